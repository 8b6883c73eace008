"""`ray job submit --working-dir . -- python jobs/follow.py CONFIG ...`: the same as `mvr-ray follow CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["follow", *sys.argv[1:]])

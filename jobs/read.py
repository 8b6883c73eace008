"""`ray job submit --working-dir . -- python jobs/read.py CONFIG ...`: the same as `mvr-ray read CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["read", *sys.argv[1:]])

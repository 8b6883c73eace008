"""`ray job submit --working-dir . -- python jobs/update.py CONFIG ...`: the same as `mvr-ray update CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["update", *sys.argv[1:]])

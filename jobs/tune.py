"""`ray job submit --working-dir . -- python jobs/tune.py CONFIG ...`: the same as `mvr-ray tune CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["tune", *sys.argv[1:]])

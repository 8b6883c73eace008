"""`ray job submit --working-dir . -- python jobs/mine.py CONFIG ...`: the same as `mvr-ray mine CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["mine", *sys.argv[1:]])

"""`ray job submit --working-dir . -- python jobs/analyze.py CONFIG ...`: the same as `mvr-ray analyze CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["analyze", *sys.argv[1:]])

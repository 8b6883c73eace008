"""`ray job submit --working-dir . -- python jobs/explain.py CONFIG ...`: the same as `mvr-ray explain CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["explain", *sys.argv[1:]])

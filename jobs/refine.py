"""`ray job submit --working-dir . -- python jobs/refine.py CONFIG ...`: the same as `mvr-ray refine CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["refine", *sys.argv[1:]])

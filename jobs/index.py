"""`ray job submit --working-dir . -- python jobs/index.py CONFIG ...`: the same as `mvr-ray index CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["index", *sys.argv[1:]])

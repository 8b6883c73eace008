"""`ray job submit --working-dir . -- python jobs/compact.py CONFIG ...`: the same as `mvr-ray compact CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["compact", *sys.argv[1:]])

"""`ray job submit --working-dir . -- python jobs/reshard.py CONFIG ...`: the same as `mvr-ray reshard CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["reshard", *sys.argv[1:]])

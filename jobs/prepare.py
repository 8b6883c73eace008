"""`ray job submit --working-dir . -- python jobs/prepare.py CONFIG ...`: the same as `mvr-ray prepare CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["prepare", *sys.argv[1:]])

"""`ray job submit --working-dir . -- python jobs/retrieve.py CONFIG ...`: the same as `mvr-ray retrieve CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["retrieve", *sys.argv[1:]])

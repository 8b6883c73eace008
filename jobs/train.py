"""`ray job submit --working-dir . -- python jobs/train.py CONFIG ...`: the same as `mvr-ray train CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])

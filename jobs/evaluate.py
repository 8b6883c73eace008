"""`ray job submit --working-dir . -- python jobs/evaluate.py CONFIG ...`: the same as `mvr-ray evaluate CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])

"""`ray job submit --working-dir . -- python jobs/versions.py CONFIG ...`: the same as `mvr-ray versions CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["versions", *sys.argv[1:]])

"""`ray job submit --working-dir . -- python jobs/serve.py CONFIG ...`: the same as `mvr-ray serve CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])

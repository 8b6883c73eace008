"""`ray job submit --working-dir . -- python jobs/search.py CONFIG ...`: the same as `mvr-ray search CONFIG ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["search", *sys.argv[1:]])

"""`ray job submit --working-dir . -- python jobs/study.py STUDY ...`: the same as `mvr-ray study STUDY ...`."""

import sys

from mvr_ray.cli import main

if __name__ == "__main__":
    main(["study", *sys.argv[1:]])

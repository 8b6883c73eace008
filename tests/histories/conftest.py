"""Makes the modules beside the tests, the index of `tests/distributed` and drafts of `tests/store` importable."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
for folder in (TESTS / "histories", TESTS / "distributed", TESTS / "store"):
    sys.path.insert(0, str(folder))

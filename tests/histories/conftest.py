"""Makes the modules beside the tests, and the made-up index of `tests/distributed`, importable."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "distributed"):
    sys.path.insert(0, str(folder))

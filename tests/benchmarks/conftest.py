"""The benchmarks' folder is no package: its modules are imported by their own names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))

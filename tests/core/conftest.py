"""Gives the tests of this folder the fixture `tiny`: random backbones of every supported kind."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from random_backbones import tiny  # noqa: F401

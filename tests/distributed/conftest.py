"""Lets the tests of this folder import the modules beside them and the S3 server, and gives them the fixture `tiny`."""

import sys
from pathlib import Path

from random_backbones import tiny  # noqa: F401

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "store")]

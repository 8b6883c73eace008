"""Puts this folder's own plain modules (asgi, library) within reach of its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

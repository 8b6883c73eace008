"""What the tests of this folder share beside the fixtures of all: the module `made`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # so that tests here can import `made`

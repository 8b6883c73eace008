"""Look for garbage rarely in every Python process that tests start.

The imports of torch, transformers and Ray make a million objects that stay; looking for garbage among them took a fifth
of their time and a tenth of that of all tests.
"""

import gc

gc.set_threshold(100_000, 50, 100)

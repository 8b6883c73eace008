"""Build, open, search and change an index from Python: `Index`, and `Encoder` for vectors alone."""

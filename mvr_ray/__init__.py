"""Multi-view passage retrieval on Ray: train, index, refine and search."""

__version__ = "0.1.0"

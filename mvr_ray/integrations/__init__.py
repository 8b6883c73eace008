"""Adapts a search server, or an index opened in this process, to other frameworks."""

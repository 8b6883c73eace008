"""Plugs a search server, or an index opened in this process, into frameworks that other people build on."""

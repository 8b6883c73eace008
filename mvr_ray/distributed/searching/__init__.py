"""Searchers of one index, in parts: what they hold and where, how they are asked, and who is told when one is lost."""

"""Opens the shards of an index on searchers, searches them and replaces searchers that are lost."""

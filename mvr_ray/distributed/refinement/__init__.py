"""One refinement, in parts: questions, labels, shards in actors, rounds, journal, and what is published."""

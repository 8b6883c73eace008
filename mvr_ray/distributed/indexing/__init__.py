"""Build index versions of a corpus: reuse embeddings, encode the rest, publish the shards, rewrite and repair them."""

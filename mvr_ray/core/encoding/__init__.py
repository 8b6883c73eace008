"""Turn texts into vectors: sentences and snippets, layout of views, backbones and their forward passes, snapshots."""

"""Texts to vectors: sentences and snippets, the layout of views, backbones and their forward passes, snapshots."""

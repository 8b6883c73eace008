"""Pretrained transformers: which, at rest and in memory, and their forward pass without padding and in fewer bits."""

"""Run a grid of variants over one corpus, each once, and report them beside the figures of the papers."""

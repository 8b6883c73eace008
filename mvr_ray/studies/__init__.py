"""Studies: a grid of variants over one corpus, each run once, and a report beside the figures of the papers."""

"""Studies: a grid of variants over one corpus, run once each, and a report that stands beside the papers."""

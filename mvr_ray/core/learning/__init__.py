"""Train the dual encoder: example batches, losses, and one step on one rank of several."""

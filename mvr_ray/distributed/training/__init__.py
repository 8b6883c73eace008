"""Train retrievers, readers and cross-encoders: examples, steps, checkpoints, and the workers of Ray Train."""

"""Training, in parts: examples, the frame of steps, what each task learns, checkpoints, the workers of Ray Train."""

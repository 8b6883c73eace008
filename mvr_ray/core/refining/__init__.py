"""Move stored embeddings by labels: pseudo-labels, AOpt steps, feedback views, and when to stop."""

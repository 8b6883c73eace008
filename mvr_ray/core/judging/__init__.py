"""Answer matching, ranking metrics with intervals, and measures of how views differ."""

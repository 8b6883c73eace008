"""Match answers, compute ranking metrics with intervals, and measure how views differ."""

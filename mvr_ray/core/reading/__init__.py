"""Models that read a question and a passage together: readers with their windows and spans, and cross-encoders."""

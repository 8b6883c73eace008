"""Read a question and a passage together: readers with their windows and spans, and cross-encoders."""

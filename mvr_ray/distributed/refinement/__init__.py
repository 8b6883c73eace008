"""Refine an index version: questions, labels, refiner actors, rounds, journal, and the published version."""

"""Planted faults of the reference, by kind."""

"""Extraction of the graph of module calls."""

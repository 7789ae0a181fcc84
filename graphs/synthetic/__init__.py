"""Synthetic graphs: random families, graphs with a known optimum, sketches of well-known models."""

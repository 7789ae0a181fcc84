"""Synthetic graphs: random families, and graphs with an optimum known by construction."""

"""Benchmarks; every speed is printed as a ratio to a baseline of the same run."""

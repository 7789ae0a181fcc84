"""Benchmarks: every speed is printed as a ratio against something in the same run."""

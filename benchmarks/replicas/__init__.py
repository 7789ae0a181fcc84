"""Benchmarks of data-parallel replicas."""

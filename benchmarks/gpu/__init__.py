"""Benchmarks of one accelerator beside a CPU."""

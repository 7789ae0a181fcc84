"""Benchmarks: ``python -m benchmarks``, and ``python -m benchmarks.gpu`` for accelerators."""

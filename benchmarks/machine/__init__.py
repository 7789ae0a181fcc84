"""Benchmarks of the model of the machine: hosts, core sets, memory, overhead of placed steps."""

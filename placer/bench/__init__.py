"""Evidence: how fast the simulator is, how good plans are, what they win when they really run.

The command ``placer bench`` shows it for the machine it runs on; deeper and longer benchmarks are
in ``benchmarks/``, next to the source.
"""

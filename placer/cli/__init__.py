"""The command line: one module per command; heavy modules are imported inside command bodies."""

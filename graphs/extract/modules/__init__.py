"""Extraction of the graph of module calls, for models that no other extractor accepts."""

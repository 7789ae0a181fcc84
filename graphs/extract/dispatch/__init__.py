"""Extraction by recording the ops that a real step dispatches."""

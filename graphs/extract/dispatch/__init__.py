"""Extraction by recording the ops that a real step dispatches, for models without an export."""

"""Placed models that run their own code, with hooks on their modules."""

"""Reads of values of tensors by the code of a model: those of checks, which steer nothing."""

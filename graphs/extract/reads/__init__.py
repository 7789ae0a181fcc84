"""Reads of tensor values by the code of a model, and its effects that are no ops of a trace."""

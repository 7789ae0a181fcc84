"""Contiguous parts of linear orders of ops, one per device."""

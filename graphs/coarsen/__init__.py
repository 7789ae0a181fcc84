"""Coarsening: groups of ops that are placed as one, and back to ops."""

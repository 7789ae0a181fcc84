"""Placers that search: list scheduling, evolution, annealing, and the portfolio of them all."""

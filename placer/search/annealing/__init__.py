"""Simulated annealing with the same moves for two energies: the step time and the largest load."""

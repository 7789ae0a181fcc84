"""Search algorithms: list scheduling, evolution, annealing, exact search and their portfolio."""

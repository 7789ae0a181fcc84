"""Methods that keep replicas in sync: one registry, gradient reductions, averages and a server."""

"""Data-parallel replicas of a placement: how they are kept in sync, and the simulation of that."""

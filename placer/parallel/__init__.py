"""Data parallelism: replicas of a placed model that stay one model."""

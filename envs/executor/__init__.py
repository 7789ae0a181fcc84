"""Runs a placed step for real: one pinned worker process per device."""

"""Executors of placed steps: worker processes on cores, torch devices, hooks on modules."""

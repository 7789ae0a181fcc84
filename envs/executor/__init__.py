"""Execution of placed steps: pinned workers for cores, one process for torch devices."""

"""Execution of placed steps."""

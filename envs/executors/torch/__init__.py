"""Placed modules on torch devices, in this process."""

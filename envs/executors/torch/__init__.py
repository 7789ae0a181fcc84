"""Placed modules on torch devices, in this process: exported calls as one generated function."""

"""Placed models that run their own code, with hooks that put their modules on devices."""

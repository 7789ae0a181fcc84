"""Costs of ops on devices: measured and cached, or modelled from the rates of a device."""

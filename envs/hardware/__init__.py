"""Devices, the links between them and their speeds: cluster files, discovery, noise."""

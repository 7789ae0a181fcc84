"""Devices, links and their speeds: files, discovery, noise."""

"""Extraction by torch.export: the traced aten graph, and the exported forward pass."""

"""Extraction by torch.export."""

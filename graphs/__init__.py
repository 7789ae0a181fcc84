"""Computation graphs of one step: schema, costs, coarsening, extraction from models, generators."""

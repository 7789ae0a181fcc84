"""Ops that a trace must have as eager mode runs them."""

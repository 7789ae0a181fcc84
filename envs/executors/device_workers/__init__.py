"""Placed steps on torch devices that each have a process of their own."""

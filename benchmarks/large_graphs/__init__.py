"""Search on large graphs: equal decodes, equal time, and graphs of up to a million ops."""

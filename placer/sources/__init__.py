"""Sources of workloads other than Python functions: one module per kind of target."""

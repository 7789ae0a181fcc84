"""What is placed: the computation graph of a step, its costs, and where graphs come from."""

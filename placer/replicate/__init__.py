"""Plans of data-parallel replicas: how many, on which devices, with which placement."""

"""What a pool of workers raises, apart from the pool: catching it needs no torch."""


class WorkerError(RuntimeError):
    """A worker died, hung or could not run an op; says which device and op. The pool is closed."""


class WorkerMemoryError(WorkerError):
    """There was no memory for what an op of a worker makes."""

"""Errors of a pool of workers, apart from the pool: catching them needs no torch."""


class WorkerError(RuntimeError):
    """A worker died, hung or could not run an op, which the message names. The pool is closed."""


class WorkerMemoryError(WorkerError):
    """An op of a worker ran out of memory."""

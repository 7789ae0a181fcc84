"""CUDA devices for tests on any machine, on which missing waits give wrong results.

Tensors on ``cuda:N`` compute on the CPU, though not when a call is made: each stream is a queue,
and the queues run in an adversarial order that a seed determines. See :func:`fake_cuda`.
"""

from tests.fake_cuda.machine import fake_cuda

__all__ = ["fake_cuda"]

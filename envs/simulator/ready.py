"""Ready ops of every device: a bitmap over ranks, and the devices that may have one to start."""

from __future__ import annotations

from typing import Final

from envs.compiled import compiled_inline, index, lowest_set_bit
from envs.simulator.arrays import TOUCHED_DEVICES, WORD_BITS, Workspace

_LOW_BITS: Final = (1 << WORD_BITS) - 1


@compiled_inline
def make_ready(work: Workspace, i: int, d: int) -> None:
    """All inputs of op i are on its device d."""
    rank = work.ops[i].rank
    word = index(rank >> WORD_BITS)
    group = index(word >> WORD_BITS)
    work.ready[d, word] |= 1 << (rank & _LOW_BITS)
    work.ready_words[d, group] |= 1 << (word & _LOW_BITS)
    device = work.devices[d]
    device.ready_first = min(device.ready_first, group)
    touch_device(work, d)


@compiled_inline
def pop_ready(work: Workspace, d: int) -> int:
    """The ready op of lowest rank on a device, or -1."""
    groups = work.ready_words.shape[1]
    group = work.devices[d].ready_first
    while group < groups and work.ready_words[d, index(group)] == 0:
        group += 1
    work.devices[d].ready_first = group
    if group == groups:
        return -1
    words = work.ready_words[d, index(group)]
    word = index((group << WORD_BITS) + lowest_set_bit(words))
    rank = index((word << WORD_BITS) + lowest_set_bit(work.ready[d, word]))
    work.ready[d, word] &= work.ready[d, word] - 1
    if work.ready[d, word] == 0:
        work.ready_words[d, index(group)] = words & (words - 1)
    return int(work.order[rank])


@compiled_inline
def clear_ready(work: Workspace) -> None:
    """Forget ready ops that will not run; a step that ends leaves none."""
    for d in range(work.ready.shape[0]):
        for word in range(work.ready.shape[1]):
            work.ready[d, word] = 0
        for word in range(work.ready_words.shape[1]):
            work.ready_words[d, word] = 0


@compiled_inline
def arrive(work: Workspace, v: int, d: int, producer: int, now: int) -> None:
    """One input of v is on its device now."""
    op = work.ops[v]
    op.remaining -= 1
    if op.remaining == 0:
        work.start_ns[v] = now
        work.cause[v] = producer
        make_ready(work, v, d)


@compiled_inline
def touch_device(work: Workspace, d: int) -> None:
    """Let a device pick an op when all that ends now has been handled."""
    device = work.devices[d]
    if not device.touched:
        device.touched = True
        work.touched_devices[index(work.counts[TOUCHED_DEVICES])] = d
        work.counts[TOUCHED_DEVICES] += 1

"""Ready ops per device (one op, or a bitmap over ranks), and devices that may start one."""

from __future__ import annotations

from typing import Final

from envs.compiled import compiled_inline, index, lowest_set_bit
from envs.simulator.arrays import TOUCHED_DEVICES, WORD_BITS, Workspace

_LOW_BITS: Final = (1 << WORD_BITS) - 1


@compiled_inline
def make_ready(work: Workspace, i: int, d: int) -> None:
    """Make op i ready on its device d, and let the device pick an op."""
    add_ready(work, i, d)
    touch_device(work, d)


@compiled_inline
def add_ready(work: Workspace, i: int, d: int) -> None:
    """Add op i to the ready ops of device d; a lone op needs no bitmap."""
    device = work.devices[d]
    device.ready += 1
    if device.ready == 1:
        device.lone = i
        return
    if device.lone >= 0:
        _set_bit(work, work.ops[index(device.lone)].rank, d)
        device.lone = -1
    _set_bit(work, work.ops[i].rank, d)


@compiled_inline
def pop_ready(work: Workspace, d: int) -> int:
    """Remove and return the ready op of lowest rank on a device, or -1."""
    device = work.devices[d]
    if device.ready == 0:
        return -1
    device.ready -= 1
    lone = device.lone
    device.lone = -1
    return int(lone) if lone >= 0 else int(work.order[_pop_bit(work, d)])


@compiled_inline
def _set_bit(work: Workspace, rank: int, d: int) -> None:
    word = index(rank >> WORD_BITS)
    group = index(word >> WORD_BITS)
    work.ready[d, word] |= 1 << (rank & _LOW_BITS)
    work.ready_words[d, group] |= 1 << (word & _LOW_BITS)
    device = work.devices[d]
    device.ready_first = min(device.ready_first, group)


@compiled_inline
def _pop_bit(work: Workspace, d: int) -> int:
    """Remove and return the lowest rank in the bitmap, which must not be empty."""
    group = work.devices[d].ready_first
    while work.ready_words[d, index(group)] == 0:
        group += 1
    work.devices[d].ready_first = group
    words = work.ready_words[d, index(group)]
    word = index((group << WORD_BITS) + lowest_set_bit(words))
    rank = index((word << WORD_BITS) + lowest_set_bit(work.ready[d, word]))
    work.ready[d, word] &= work.ready[d, word] - 1
    if work.ready[d, word] == 0:
        work.ready_words[d, index(group)] = words & (words - 1)
    return rank


@compiled_inline
def clear_ready(work: Workspace) -> None:
    """Clear ready ops that will not run; a completed step leaves none."""
    for d in range(work.ready.shape[0]):
        for word in range(work.ready.shape[1]):
            work.ready[d, word] = 0
        for word in range(work.ready_words.shape[1]):
            work.ready_words[d, word] = 0


@compiled_inline
def arrive(work: Workspace, v: int, d: int, producer: int, now: int) -> None:
    """Count one more input of v as arrived on its device now."""
    op = work.ops[v]
    op.remaining -= 1
    if op.remaining == 0:
        work.start_ns[v] = now
        work.cause[v] = producer
        make_ready(work, v, d)


@compiled_inline
def touch_device(work: Workspace, d: int) -> None:
    """Let a device pick an op once everything that ends now has been handled."""
    device = work.devices[d]
    if not device.touched:
        device.touched = True
        work.touched_devices[index(work.counts[TOUCHED_DEVICES])] = d
        work.counts[TOUCHED_DEVICES] += 1

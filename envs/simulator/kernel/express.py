"""The express path: the end of a transfer is known in advance, so transfers are no events.

It applies where ``ProblemArrays.express`` is set: every op and every transfer takes at least a
nanosecond, outputs are sent once per destination, there are at most 64 devices, and each queue
serves one transfer at a time in order of request. Everything that ends at an instant is then one
round, and requests reach a queue in the order in which it serves them, so a request can be answered
at once: the transfer starts now, or when the previous one ends. An op is ready at the latest
arrival of its inputs, known when the last of its producers ends. If its device is busy until then,
it counts as ready right away; otherwise that is an event, one per op instead of one per transfer.

Memory is bounded from above: a copy for each reader, from the request of its transfer until the
reader ends; an output until its last reader on any device ends. If this fits on every device, so
does the exact amount. If not, or near the horizon, the express path gives up and the full path
(``envs.simulator.kernel.full``) decides.

Starts and causes equal those of the full path. The *arrival* of an input is ``time << CODE_BITS``,
plus 1 + its producer if that ran on another device: of inputs that arrive at once, the cause is the
remote one with the last producer. An op whose last input was made on its own device, or that waited
for its device, has the previous op there as its cause, which made that input.
"""

from __future__ import annotations

from typing import Final

from envs.compiled import compiled_borrowing, compiled_inline, index, int64, lowest_set_bit
from envs.problem import HORIZON_NS, Ints, transfer_ns
from envs.simulator.kernel.arrays import (
    CODE_BITS,
    INFEASIBLE_NS,
    NO_EVENT,
    READY_LATER,
    ProblemArrays,
    Workspace,
)
from envs.simulator.kernel.load import extra_ns, shares_machine
from envs.simulator.kernel.queues import (
    add_event,
    add_ready,
    pop_event,
    pop_ready,
    push_event,
    set_event,
)

GIVES_UP: Final = -1
_GOES_ON: Final = -2
_CODE_MASK: Final = (1 << CODE_BITS) - 1


@compiled_inline
def express_core(
    arrays: ProblemArrays, work: Workspace, devices: Ints, limit_ns: int, follows_memory: bool
) -> int:
    """Return what ``simulate_core`` returns, or ``GIVES_UP``; the workspace must be reset.

    Sets of devices are words of 64 bits.
    """
    picking = _reset(work, follows_memory)
    now = int64(0)
    while True:
        started = picking  # or busy, or without a ready op
        while picking != 0:
            d = index(lowest_set_bit(picking))
            picking &= picking - 1
            answer = _start_op(arrays, work, d, now, limit_ns, follows_memory)
            if answer != _GOES_ON:
                return answer
        if arrays.has_load:
            answer = _add_load(arrays, work, started, now, limit_ns)
            if answer != _GOES_ON:
                return answer
        event = min(work.ends[1], work.ready_later[0])
        if event == NO_EVENT:
            return now
        now = event >> CODE_BITS
        picking = _make_ready(work, devices, now)
        ended = _stop_devices(work, now)
        for k in range(ended):
            d = index(work.touched_devices[index(k)])
            picking |= 1 << d
            answer = _end_op(arrays, work, devices, d, now, follows_memory)
            if answer != _GOES_ON:
                return answer


@compiled_inline
def _reset(work: Workspace, follows_memory: bool) -> int:
    """Reset the express fields; return the set of devices that have ready ops."""
    for k in range(len(work.ends)):
        work.ends[k] = NO_EVENT
    work.ready_later[0] = NO_EVENT
    for q in range(len(work.queues)):
        work.queues[q].free_ns = 0
    if follows_memory:
        for i in range(len(work.received_bytes)):
            work.received_bytes[i] = 0
    picking = 0
    for d in range(len(work.devices)):
        device = work.devices[d]
        device.busy_until_ns = 0
        if device.ready > 0:
            picking |= 1 << d
    return picking


@compiled_inline
def _start_op(
    arrays: ProblemArrays,
    work: Workspace,
    d: int,
    now: int,
    limit_ns: int,
    follows_memory: bool,
) -> int:
    """Start the next op of device d, if it is idle; return ``_GOES_ON`` or the final answer."""
    device = work.devices[d]
    if device.busy_until_ns > now:
        return _GOES_ON
    ready = pop_ready(work, d)
    if ready < 0:
        return _GOES_ON
    i = index(ready)
    op = arrays.ops[i]
    cost = arrays.cost_ns[i, arrays.column[d]]
    end = now + cost
    at_least = max(now + device.work_left_ns, end + op.tail_ns)
    if at_least > limit_ns:
        return int(at_least)
    if end >= HORIZON_NS:
        return GIVES_UP
    device.work_left_ns -= cost
    latest = work.ops[i].latest
    producer = latest & _CODE_MASK
    brought = (producer > 0) & (latest >> CODE_BITS == now)
    work.cause[i] = producer - 1 if brought else device.previous
    work.start_ns[i] = now
    device.previous = i
    device.busy_until_ns = end
    if not arrays.has_load:
        add_event(work.ends, int64(d), (end << CODE_BITS) | d)
    if follows_memory:
        work.ops[i].remaining = arrays.ops[index(i + 1)].successor_start - op.successor_start
        device.used_bytes += op.start_bytes
        if device.used_bytes > arrays.memory_bytes[d]:
            return GIVES_UP
    return _GOES_ON


@compiled_borrowing
def _add_load(arrays: ProblemArrays, work: Workspace, started: int, now: int, limit_ns: int) -> int:
    """Let the ops of a set of devices that start now take longer where others compute.

    Return ``_GOES_ON`` or the final answer.
    """
    while started != 0:
        d = index(lowest_set_bit(started))
        started &= started - 1
        device = work.devices[d]
        if device.busy_until_ns <= now or work.start_ns[device.previous] != now:
            continue
        busy = 0
        others = 0
        for other in range(len(work.devices)):
            if shares_machine(arrays, d, other):
                others += 1
                busy += work.devices[index(other)].busy_until_ns > now
        i = index(device.previous)
        end = device.busy_until_ns + extra_ns(arrays, i, d, busy, others)
        at_least = end + max(device.work_left_ns, arrays.ops[i].tail_ns)
        if at_least > limit_ns:
            return int(at_least)
        if end >= HORIZON_NS:
            return GIVES_UP
        work.end_ns[i] = end
        device.busy_until_ns = end
        add_event(work.ends, int64(d), (end << CODE_BITS) | d)
    return _GOES_ON


@compiled_inline
def _make_ready(work: Workspace, devices: Ints, now: int) -> int:
    """Make ops ready whose last input arrives now; return the set of their devices."""
    changed = 0
    while work.ready_later[0] >> CODE_BITS == now and work.ready_later[0] != NO_EVENT:
        v = index(work.ready_later[0] & _CODE_MASK)
        work.counts[READY_LATER] = pop_event(work.ready_later, work.counts[READY_LATER])
        d = index(devices[v])
        add_ready(work, v, d)
        changed |= 1 << d
    return changed


@compiled_inline
def _stop_devices(work: Workspace, now: int) -> int:
    """List the devices whose op ends now, by op; return their number."""
    ended = 0
    while work.ends[1] >> CODE_BITS == now and work.ends[1] != NO_EVENT:
        d = index(work.ends[1] & _CODE_MASK)
        set_event(work.ends, int64(d), int64(NO_EVENT))
        at = ended
        while at > 0:
            other = work.touched_devices[index(at - 1)]
            if work.devices[other].previous < work.devices[d].previous:
                break
            work.touched_devices[index(at)] = other
            at -= 1
        work.touched_devices[index(at)] = d
        ended += 1
    return ended


@compiled_inline
def _end_op(
    arrays: ProblemArrays,
    work: Workspace,
    devices: Ints,
    d: int,
    now: int,
    follows_memory: bool,
) -> int:
    """End the op on d: send its output, and tell its readers when it arrives."""
    i = index(work.devices[d].previous)
    if follows_memory:
        _release(arrays, work, devices, i, d)
    begin, end = arrays.ops[i].successor_start, arrays.ops[index(i + 1)].successor_start
    readers = 0
    for k in range(begin, end):
        edge = arrays.edges[index(k)]
        to = index(devices[edge.target])
        most_bytes = work.devices[to].sent_bytes * ((readers >> to) & 1)  # so far, of this output
        work.devices[to].sent_bytes = max(most_bytes, edge.bytes)
        readers |= 1 << to
    work.devices[d].arrival = now << CODE_BITS
    answer = _send(arrays, work, i, d, readers & ~(1 << d), now)
    if answer != _GOES_ON:
        return answer
    for k in range(begin, end):
        v = arrays.edges[index(k)].target
        to = index(devices[v])
        device = work.devices[to]
        if follows_memory and to != d:
            work.received_bytes[v] += device.sent_bytes
            device.used_bytes += device.sent_bytes
            if device.used_bytes > arrays.memory_bytes[to]:
                return GIVES_UP
        op = work.ops[v]
        op.latest = max(op.latest, device.arrival)
        op.remaining -= 1
        if op.remaining == 0:
            ready_ns = op.latest >> CODE_BITS
            if ready_ns <= device.busy_until_ns:
                add_ready(work, v, to)
            else:
                event = (ready_ns << CODE_BITS) | v
                count = push_event(work.ready_later, work.counts[READY_LATER], event)
                work.counts[READY_LATER] = count
    return _GOES_ON


@compiled_inline
def _send(arrays: ProblemArrays, work: Workspace, i: int, d: int, readers: int, now: int) -> int:
    """Request the transfers of op i from d to a set of devices, in index order."""
    while readers != 0:
        to = index(lowest_set_bit(readers))
        readers &= readers - 1
        pair = arrays.pairs[index(d * len(work.devices) + to)]
        if not pair.connected:
            return INFEASIBLE_NS
        device = work.devices[to]
        arrival = now + transfer_ns(pair.latency_s, device.sent_bytes, pair.bandwidth_bytes_per_s)
        if pair.queue >= 0:
            queue = work.queues[index(pair.queue)]
            arrival += max(queue.free_ns - now, 0)
            queue.free_ns = arrival
        if arrival >= HORIZON_NS:
            return GIVES_UP
        device.arrival = (arrival << CODE_BITS) | (i + 1)
    return _GOES_ON


@compiled_inline
def _release(arrays: ProblemArrays, work: Workspace, devices: Ints, i: int, d: int) -> None:
    """Free the workspace and the inputs of op i, which ran on d.

    ``remaining`` of an op that has started counts readers that have not ended.
    """
    work.devices[d].used_bytes -= arrays.ops[i].workspace_bytes + work.received_bytes[i]
    for k in range(arrays.ops[i].predecessor_start, arrays.ops[index(i + 1)].predecessor_start):
        u = arrays.edges[index(k)].predecessor
        work.ops[u].remaining -= 1
        if work.ops[u].remaining == 0:
            work.devices[index(devices[u])].used_bytes -= arrays.ops[u].output_bytes

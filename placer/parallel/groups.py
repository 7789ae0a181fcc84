"""Process groups: creating them, and checking that their ranks agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def check_same(what: str, text: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise a ValueError on every rank unless all of a group (None: all ranks) pass the same text.

    The message names ``what``, and which ranks have which digest.
    """
    ranks_of: dict[str, list[int]] = {}
    members = dist.get_process_group_ranks(group)
    for rank, digest in zip(members, digests(text, group), strict=True):
        ranks_of.setdefault(digest, []).append(rank)
    if len(ranks_of) > 1:
        by_size = sorted(ranks_of.items(), key=lambda item: -len(item[1]))
        holders = [f"{rank_list(ranks)}: {digest[:12]}" for digest, ranks in by_size]
        raise ValueError(f"{what}: ranks differ ({'; '.join(holders)})")


def digests(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the SHA-256 of each rank's text, in hexadecimal digits."""
    digest = hashlib.sha256(text.encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=wire_device(group))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return [bytes(one.tolist()).hex() for one in gathered]


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device type whose tensors the backend of a group takes."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def rank_list(ranks: Sequence[int]) -> str:
    """Format ranks for messages.

    >>> rank_list([1]), rank_list([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """Create a group of some ranks, or of all, with the timeout of the default group.

    Only the member ranks take part. Torch gives a new group its own default of 30 minutes and has
    no public way to read another group's timeout.
    """
    whole = dist.group.WORLD
    assert whole is not None, "there is no process group yet"
    limit = whole._get_backend(wire_device(whole)).options._timeout
    made: dist.ProcessGroup = dist.new_group(
        None if ranks is None else list(ranks),
        timeout=limit,
        backend=backend,
        use_local_synchronization=ranks is not None,
    )
    return made


def groups_of_slots(
    devices: Sequence[torch.device],
) -> Callable[[torch.device], dist.ProcessGroup | None]:
    """Create a group of all ranks for each device of a replica, so that none waits for another.

    Every rank passes equally many devices; the k-th devices of all ranks reduce with each other. A
    single device, or any other device, uses the default group.
    """
    groups = {device: new_group() for device in (devices if len(devices) > 1 else ())}
    return groups.get

"""Process groups: creating them, and checking that their ranks agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist


def check_same(what: str, own: str, group: dist.ProcessGroup | None = None) -> None:
    """Check that a text is the same on all ranks of a group (None: all ranks), by its digest.

    Raises:
        ValueError: on every rank if texts differ; names ``what``, and which ranks have which
            digest.
    """
    found = digests(own, group)
    members = dist.get_process_group_ranks(group)
    if len(set(found)) > 1:
        raise ValueError(f"{what}: ranks differ, {_told(dict(zip(members, found, strict=True)))}")


def digests(own: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the SHA-256 of each rank's text, in hexadecimal digits."""
    digest = hashlib.sha256(own.encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=wire_device(group))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return [bytes(one.tolist()).hex() for one in every]


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device type whose tensors the backend of a group takes."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _told(digest_of: Mapping[int, str]) -> str:
    holders: dict[str, list[int]] = {}
    for rank, digest in digest_of.items():
        holders.setdefault(digest, []).append(rank)
    by_size = sorted(holders.items(), key=lambda item: -len(item[1]))
    return ", ".join(
        f"{rank_list(ranks)} {'have' if len(ranks) > 1 else 'has'} {digest[:12]}"
        for digest, ranks in by_size
    )


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
    several = devices if len(devices) > 1 else ()
    found = {device: new_group() for device in several}
    return found.get

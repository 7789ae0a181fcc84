"""What a rank was asked for, and what of it decides whether two runs are one."""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envs.placement import Placement
    from placer.parallel.planned import Manner


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a rank was asked for."""

    args: argparse.Namespace
    placement: Placement  # as in its file
    manner: Manner
    own: Placement  # on the devices of this rank
    is_shared: bool  # with other ranks of this host

    @property
    def essence(self) -> str:
        """What the placement says, whoever made it."""
        content = self.placement.to_dict()
        keys = ("graph", "devices", "priority", "replicas")
        return json.dumps({key: content.get(key) for key in keys})

    @property
    def course(self) -> dict[str, Any]:
        """What one run may have otherwise than the one that it goes on from."""
        return {name: getattr(self.args, name) for name in ("steps", "checkpoint_every", "resume")}

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the losses."""
        names = ("target", "data", "optimizer", "lr", "seed", "dtype", "extractor")
        given = {name: getattr(self.args, name) for name in names}
        options = self.manner.options
        return given | {
            "sync": self.manner.sync,
            "accumulate": self.manner.accumulate,
            "bucket_bytes": self.manner.bucket_bytes,
            **{name: getattr(options, name) for name in options.given},
            "placement": hashlib.sha256(self.essence.encode()).hexdigest()[:12],
        }

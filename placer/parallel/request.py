"""The request to run a rank, and which parts of it identify the run."""

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
    """The request to run a rank."""

    args: argparse.Namespace
    placement: Placement  # as in the file
    manner: Manner
    own: Placement  # on the devices of this rank
    is_shared: bool  # whether other ranks of this host use the same devices

    @property
    def essence(self) -> str:
        """JSON of the parts of the placement that determine the run, without provenance."""
        content = self.placement.to_dict()
        keys = ("graph", "devices", "priority", "replicas")
        return json.dumps({key: content.get(key) for key in keys})

    @property
    def course(self) -> dict[str, Any]:
        """Settings that may change when a run is resumed."""
        return {name: getattr(self.args, name) for name in ("steps", "checkpoint_every", "resume")}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that determine the losses."""
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

"""The interface of export formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from placer.export.placed_modules import PlacedModules


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A placement in the format of another runtime, with remarks of one sentence each.

    ``is_as_placed`` says whether every op that the runtime places is on its device in the
    placement.
    """

    content: Any  # str or plain data for JSON
    is_as_placed: bool
    remarks: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the file content: JSON, or the text itself."""
        if isinstance(self.content, str):
            return self.content + "\n"
        return json.dumps(self.content, indent=1) + "\n"


class Format(Protocol):
    """Writes placements for one runtime."""

    def __call__(self, placed: PlacedModules) -> Exported:
        """Return the placement in the runtime's format.

        Raises:
            ExportError: the runtime cannot run it; the message names the module.
        """
        ...

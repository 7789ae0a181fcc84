"""What a format is: it writes a placement down as another runtime reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from placer.export.placed_modules import PlacedModules


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A placement in another runtime's terms, and what its user should know, a sentence each.

    ``is_as_placed`` is whether every op that the runtime places is on the device that it has in the
    placement.
    """

    content: Any  # str, or what JSON can hold
    is_as_placed: bool
    remarks: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What goes into a file: JSON, or the text as it is."""
        if isinstance(self.content, str):
            return self.content + "\n"
        return json.dumps(self.content, indent=1) + "\n"


class Format(Protocol):
    """Writes a placement for one runtime."""

    def __call__(self, placed: PlacedModules) -> Exported:
        """The placement as the runtime reads it.

        Raises:
            ExportError: the runtime cannot run it; the message says which module is in the way.
        """
        ...

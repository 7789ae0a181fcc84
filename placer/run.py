"""``placer run`` as a module, which torchrun starts once per rank.

::

    torchrun --nproc-per-node=2 -m placer.run model.py:build --placement placement.json --steps 100
"""

from __future__ import annotations

from typing import NoReturn

from placer.cli import main


def script() -> NoReturn:
    """Run ``placer run`` and exit."""
    main.script("run")


if __name__ == "__main__":
    script()

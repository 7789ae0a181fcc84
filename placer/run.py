"""``placer run`` as a module, which torchrun starts once per rank.

::

    torchrun --nproc-per-node=2 -m placer.run model.py:build --placement placement.json --steps 100
"""

from placer.cli.main import script

if __name__ == "__main__":
    script("run")

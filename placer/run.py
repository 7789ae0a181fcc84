"""Train replicas of a placed model, one on each rank that torchrun starts.

::

    torchrun --nproc-per-node=2 -m placer.run model.py:build --placement placement.json --steps 100
"""

from placer.cli.run import script

if __name__ == "__main__":
    script()

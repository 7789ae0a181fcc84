"""Published search algorithms to compare with, registered like the placers of a plug-in."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.baselines.cross_entropy import CrossEntropy
from benchmarks.baselines.op_by_op import OpByOp
from benchmarks.baselines.sequence_to_sequence import SequenceToSequence
from placer import register_placer


def register_baselines() -> None:
    """Register the baselines by name in this process; min-cut only where pymetis is installed."""
    register_placer("cross-entropy", CrossEntropy, "learns device probabilities of groups")
    register_placer(
        "sequence-to-sequence",
        SequenceToSequence,
        "REINFORCE on an LSTM that reads and places groups (2017)",
    )
    register_placer("op-by-op", OpByOp, "MaskablePPO that places one op after the other")
    if find_spec("pymetis"):
        from benchmarks.baselines.min_cut import MinCut

        register_placer("min-cut", MinCut, "METIS: balanced parts with short transfers")

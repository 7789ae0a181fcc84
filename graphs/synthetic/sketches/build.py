"""Building forward graphs from tensor sizes.

Op costs follow the roofline of a V100-class device (NVIDIA V100 PCIe data sheet: 14 TFLOP/s in
fp32, of which convolutions and matrix products reach about 60 %, and 900 GB/s), plus 8 us to
launch. They hold for any device kind (``"*"``): the graphs are for training and testing placers,
not for predicting step times. All tensors are fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import networkx as nx

from graphs.graph import ANY_KIND, add_edge, add_op, attributes_of, new_graph
from graphs.synthetic.mirror import WEIGHT, with_backward

REACHED_FLOP_PER_S: Final = 0.6 * 14e12
MEMORY_BYTES_PER_S: Final = 900e9
FLOOR_S: Final = 8e-6
ELEMENT_BYTES: Final = 4


class Sketch:
    """Builder of a forward graph."""

    def __init__(self, name: str) -> None:
        self.graph = new_graph(name, {ANY_KIND: "roofline of a V100-class device"})

    def op(
        self,
        op_id: str,
        inputs: Sequence[str] = (),
        *,
        outputs: int,
        flops: int = 0,
        parameters: int = 0,
        colocate: str | None = None,
    ) -> str:
        """Add an op by its id, ``module[@call]:op[#occurrence]``, and return the id.

        ``outputs`` and ``parameters`` are counts of elements.
        """
        module, _, name = op_id.partition("#")[0].rpartition(":")
        inputs = list(dict.fromkeys(inputs))
        read = sum(attributes_of(self.graph, source)["output_bytes"] for source in inputs)
        moved = read + ELEMENT_BYTES * (outputs + parameters)
        cost_s = FLOOR_S + max(flops / REACHED_FLOP_PER_S, moved / MEMORY_BYTES_PER_S)
        add_op(
            self.graph,
            op_id,
            cost_s={ANY_KIND: 0.0 if name == WEIGHT else cost_s},
            op=name,
            module=module.partition("@")[0],
            flops=flops,
            moved_bytes=moved,
            output_bytes=ELEMENT_BYTES * outputs,
            saved_bytes=0 if name == WEIGHT else ELEMENT_BYTES * outputs,
            parameter_bytes=ELEMENT_BYTES * parameters,
            colocate=colocate,
        )
        for source in inputs:
            add_edge(self.graph, source, op_id)
        return op_id

    def weight(self, module: str, elements: int, colocate: str | None = None) -> str:
        """Add parameters as an op of their own, whose output is sent to all ops that read them."""
        return self.op(
            f"{module}:{WEIGHT}", outputs=elements, parameters=elements, colocate=colocate
        )

    def linear(self, path: str, x: str, *, rows: int, inputs: int, outputs: int) -> str:
        """Add a matrix product with parameters of its own, (rows, inputs) to (rows, outputs)."""
        return self.op(
            f"{path}:linear",
            [x],
            outputs=rows * outputs,
            flops=2 * rows * inputs * outputs,
            parameters=inputs * outputs,
        )

    def training_step(self) -> nx.DiGraph[str]:
        """Return the graph with its backward pass."""
        return with_backward(self.graph)

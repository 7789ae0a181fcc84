"""Export as llama.cpp ``--override-tensor``: the buffer for the experts of each layer.

llama.cpp uses its own tensor names; the experts of a layer are stacked, as in
``blk.3.ffn_up_exps.weight``. The text is the argument: ``PATTERN=BUFFER``, separated by commas.
Tensors count as experts by the pattern of llama.cpp's own ``--cpu-moe``.
"""

from __future__ import annotations

from placer.exports.format import FormatOutput
from placer.exports.module_tree import is_inside, stacks
from placer.exports.placed_modules import PlacedModules
from placer.exports.renaming import ExportError

EXPERTS = "experts"
WEIGHTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps\."


def override_patterns(placed: PlacedModules) -> FormatOutput:
    """Return one pattern per device with experts; all other tensors are left to llama.cpp."""
    experts = _experts(placed)
    device_of: dict[int, str] = {}
    for layer, modules in experts.items():
        device_of[layer] = placed.majority(modules) or placed.home(modules[0])
    layers_on: dict[str, list[int]] = {}
    for layer, device in sorted(device_of.items()):
        layers_on.setdefault(_buffer(device), []).append(layer)
    patterns = [
        rf"blk\.({'|'.join(map(str, layers))})\.{WEIGHTS}={buffer}"
        for buffer, layers in sorted(layers_on.items())
    ]
    home = {module: device_of[layer] for layer, modules in experts.items() for module in modules}
    return FormatOutput(content=",".join(patterns), runs_on=placed.by_module(home))


def _experts(placed: PlacedModules) -> dict[int, list[str]]:
    lists = [
        path
        for path, _ in placed.model.named_modules()
        if path.rpartition(".")[2] == EXPERTS and EXPERTS not in path.split(".")[:-1]
    ]
    experts: dict[str, dict[int, list[str]]] = {}
    for stack in stacks(placed.model):
        for number, layer in enumerate(stack.layers):
            inside = [path for path in lists if is_inside(path, layer)]
            if inside:
                experts.setdefault(stack.path, {})[number] = inside
    name = type(placed.model).__name__
    if not experts:
        raise ExportError(
            f"{name} has no layers with experts (modules called {EXPERTS}): overrides are for "
            "mixtures of experts"
        )
    if len(experts) > 1:
        raise ExportError(
            f"{name} has experts in {len(experts)} lists of layers, {', '.join(experts)}, but "
            "overrides name layers by number alone; the format device-map names modules instead"
        )
    [only] = experts.values()
    return only


def _buffer(device: str) -> str:
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return "CPU"
    if kind == "cuda":
        return f"CUDA{index or 0}"
    raise ExportError(f"llama.cpp has no buffer for {device}: rename it, as in {device}=cpu")

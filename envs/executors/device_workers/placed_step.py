"""A placed step whose torch devices are each driven by a worker process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from envs.executors.checks import checked_rate, load_optimizer_state, matched_leaves
from envs.executors.cores.custom_ops import registrations
from envs.executors.device_workers.pool import DevicePool, deferred_interrupt
from envs.executors.device_workers.sharing import SHARING, Sharing
from envs.executors.device_workers.sources import step_sources
from envs.executors.device_workers.worker import Peaks
from envs.executors.state_devices import STATE_ROLES
from envs.executors.torch.forward_source import LaunchOrder
from envs.hardware.torch_devices import CPU
from graphs.extract import Extraction
from graphs.extract.export.trace import Position
from graphs.extract.program import Ref


class PlacedStep:
    """Runs steps of a model on the torch devices of a placement, one process per device.

    Parameters and buffers are copied to the device that reads them first, where the optimizer of
    the step updates them: a training step needs one. The model keeps the values that it had when it
    was placed until :meth:`read_back` or :meth:`close`, and its own changes have no effect until
    :meth:`write`. If a worker fails, what was not read back is lost. Ctrl-C has an effect once the
    step is over, or all values are copied; a second one ends the workers at once.

    Results are on the CPU. A step ends when all devices are idle. Random numbers differ from those
    of the model itself: each worker has its own.

    Use as a context manager, or call :meth:`close`.
    """

    def __init__(
        self,
        extraction: Extraction,
        places: Mapping[str, torch.device],
        order: Sequence[str] = (),
        *,
        limits: Mapping[torch.device, int] | None = None,
        sharing: Sharing | None = None,
        step_timeout_s: float = 600.0,
    ) -> None:
        """Start the workers and copy the states to them.

        Args:
            extraction: the step that was placed.
            places: device of every placed call, by key.
            order: keys of calls, the first to be launched first.
            limits: bytes that may be allocated on GPUs.
            sharing: how processes of GPUs share memory, by default as CUDA does.
            step_timeout_s: a step that takes longer counts as hung.

        Raises:
            ValueError: a training step has no optimizer, or a call writes in place to a tensor
                that another process has.
            WorkerError: a worker did not start, or cannot use its device.
        """
        self._step = step = extraction.step
        if step.training and step.optimizer is None:
            raise ValueError(
                "workers of torch devices keep the parameters, so their step must update them: "
                'give it an optimizer, such as "adamw"'
            )
        self._extraction = extraction
        self._program = program = extraction.forward
        state = step.named_state()
        of_gradients = {id(state[name]) for name in extraction.program.gradients}
        self._names = {s.value: s.name for s in program.sources if s.role in STATE_ROLES}
        self._trained = frozenset(
            value
            for value, name in self._names.items()
            if step.training and id(state[name]) in of_gradients
        )
        devices = list(dict.fromkeys(places.values()))
        numbers = {key: devices.index(device) for key, device in places.items()}
        launched = LaunchOrder(program).of(places, order)
        sources = step_sources(program, launched, numbers, devices, self._trained)
        self._sources = sources
        self._rate = 0.0 if step.optimizer is None else step.optimizer.learning_rate
        self._pool = DevicePool(
            sources,
            devices,
            constants={s.value: s.tensor for s in program.sources if s.tensor is not None},
            dtype=step.dtype,
            optimizer=step.optimizer if step.training else None,
            custom_ops=registrations(extraction.program, program),
            limits=limits or {},
            sharing=sharing or SHARING,
            step_timeout_s=step_timeout_s,
        )
        self._slots = self._pool.memory.tensors()
        self._inputs = {s.value: int(s.name) for s in program.sources if s.role == "input"}
        try:
            self.write()
        except BaseException:
            self._pool.close()
            raise

    def __enter__(self) -> PlacedStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, *_: object, **__: object) -> Any:
        """Raise TypeError, which says what runs a step."""
        raise TypeError("workers run whole steps: call placed.step(batch)")

    def step(self, *batch: Any, **keywords: Any) -> Any:
        """Run one step on a batch shaped like the example inputs.

        A training step updates the parameters and returns the loss, an inference step returns what
        the model returns.

        Raises:
            ValueError: the batch does not match the example inputs.
            WorkerError: a worker died, hung, or could not run an op.
        """
        self._pool.check_open()
        self._extraction.check_constants()
        bound = self._step.bound(
            *self._step.unpacked(batch, keywords), training=self._step.training
        )
        leaves = matched_leaves(self._step, *bound)
        with torch.no_grad():
            for of_device in self._sources.devices:
                for value, edge in of_device.inputs.items():
                    self._slots[edge].copy_(leaves[self._inputs[value]])
        self._pool.run(self._rate)
        results = self._results(leaves)
        return tree_map(
            lambda leaf: results[leaf.number] if isinstance(leaf, Position) else leaf,
            self._extraction.outputs,
        )

    def _results(self, leaves: Sequence[Any]) -> list[Any]:
        edges: dict[int, int] = {}
        for of_device in self._sources.devices:
            edges |= of_device.results
        results: list[Any] = []
        for position, result in enumerate(self._program.results):
            if position in edges:
                results.append(self._slots[edges[position]].clone())
            else:
                results.append(
                    leaves[self._inputs[result.value]] if isinstance(result, Ref) else None
                )
        return results

    def write(self) -> None:
        """Copy the parameters and buffers of the model to the devices.

        Raises:
            WorkerError: a worker died, or its device has no room.
        """
        state = self._step.named_state()
        with deferred_interrupt():
            for number, of_device in enumerate(self._sources.devices):
                for value in of_device.states:
                    self._pool.ask_one(
                        number,
                        "load_state",
                        value=value,
                        tensor=state[self._names[value]].detach().to(CPU).clone(),
                        trained=value in self._trained,
                    )

    @torch.no_grad()
    def read_back(self) -> None:
        """Copy parameters and buffers back to the model.

        Raises:
            WorkerError: a worker died; the model keeps the values that it has.
        """
        state = self._step.named_state()
        with deferred_interrupt():
            read = {
                self._names[value]: self._pool.ask_one(number, "state", value=value)
                for number, of_device in enumerate(self._sources.devices)
                for value in of_device.states
            }
            for name, tensor in read.items():  # all or none
                state[name].copy_(tensor)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the step's optimizer; a new value is used from the next step on.

        Raises:
            ValueError: the step has no optimizer, or the rate is negative or not finite.
        """
        self._check_optimizer()
        return self._rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._check_optimizer()
        self._rate = checked_rate(rate)

    def _check_optimizer(self) -> None:
        if self._step.optimizer is None:
            raise ValueError('the placed step has no optimizer: give apply one, such as "adamw"')

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the optimizer's state, such as ``exp_avg.<parameter>``; {} without one.

        ``step.<parameter>`` counts the updates of adam and adamw.
        """
        states = self._pool.ask([("optimizer_state", {})] * len(self._pool.devices))
        return {
            f"{slot}.{self._names[value]}": tensor
            for of_device in states
            for (slot, value), tensor in of_device.items()
        }

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the state from :meth:`optimizer_state`.

        Raises:
            ValueError: it is the state of another optimizer or model.
        """
        current = self.optimizer_state()
        load_optimizer_state(current, state)
        messages = []
        for of_device in self._sources.devices:
            own = {self._names[value]: value for value in of_device.states}
            split = {name: tuple(name.partition(".")[::2]) for name in current}
            kept = {
                (slot, own[parameter]): current[name]
                for name, (slot, parameter) in split.items()
                if parameter in own
            }
            messages.append(("load_optimizer_state", {"state": kept}))
        self._pool.ask(messages)

    def peaks(self) -> dict[torch.device, Peaks]:
        """Return the peaks of each GPU so far."""
        peaks = self._pool.ask([("peaks", {})] * len(self._pool.devices))
        devices = self._pool.devices
        return {d: peak for d, peak in zip(devices, peaks, strict=True) if peak is not None}

    def close(self) -> None:
        """End the workers, after copying their parameters and buffers back to the model."""
        try:
            if not self._pool.closed:
                self.read_back()
        finally:
            self.discard()

    def discard(self) -> None:
        """End the workers at once; the model keeps the values that it has."""
        self._pool.close()

"""Connection to a Ray cluster, whose nodes run tasks (extra: cluster).

Tasks are stateless, so that another node can redo those of a node that dies, with the same results.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from placer.startup import VERSION

MOST_DEATHS: Final = 5
"""Times that the process or the node of a task may die."""
LOOPBACK: Final = "127.0.0.1"
SCHEME: Final = "ray://"
PORT: Final = 6379
"""Port of the head of a cluster that ``ray start --head`` starts."""
ANSWER_S: Final = 8.0
"""Time in which the head of a cluster must answer."""
START_S: Final = 60.0
"""Time in which every node must run a first task: its process has to start."""
POLL_S: Final = 0.2

T = TypeVar("T")
ShouldEnd: TypeAlias = Callable[[int], bool]


class Shared(NamedTuple):
    """A value that tasks use, and the function that prepares it once in every process."""

    reference: list[Any]  # in a list: Ray would fetch the value with every task
    prepare: Callable[[Any], Any]


class RayCluster:
    """A connection to a Ray cluster; a context manager, which disconnects.

    All nodes must have this version of placer, torch, numpy and numba.
    """

    def __init__(self, address: str = "") -> None:
        """Connect to the cluster at ``address`` or ``$RAY_ADDRESS``, or start a local one.

        The address is ``HOST:PORT`` of the head node, also with ``ray://`` before it. This machine
        must be a node of the cluster.

        Raises:
            ValueError: Ray is not installed, or a node has other versions.
            ConnectionError: nothing answers, or the cluster has no processors.
        """
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ValueError(
                "Ray is not installed: pip install 'device-placer[cluster]'"
            ) from error
        self._ray: Any = ray
        self._connected = not ray.is_initialized()
        address = address or os.environ.get("RAY_ADDRESS", "")
        try:
            if self._connected:
                with _signal_handlers_kept():
                    _connect(ray, address.removeprefix(SCHEME))
            self._versions = versions()
            # Ray itself would repeat what the memory of a node does not suffice for, for ever.
            self._run = ray.remote(num_cpus=1, max_retries=0)(_run)
            self._check_nodes()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; a cluster started by this instance ends."""
        if self._connected:
            self._ray.shutdown()

    @property
    def processors(self) -> int:
        """Return the number of processors of all nodes that are alive."""
        return int(self._ray.cluster_resources().get("CPU", 0))

    def share(self, value: object, prepare: Callable[[Any], Any]) -> Shared:
        """Return a value for tasks, which each process fetches and prepares once."""
        return Shared([self._ray.put(value)], prepare)

    def run(
        self,
        function: Callable[..., T],
        shared: Shared,
        tasks: Sequence[tuple[Any, ...]],
        should_end: ShouldEnd = lambda _: False,
    ) -> list[T | None]:
        """Return ``function(prepared, *task)`` of each of the tasks, each run on a processor.

        ``should_end`` is called with the number of finished tasks several times a second. Once it
        returns True, the others are cancelled; their results are None. A task whose process or
        node dies is run again.

        Raises:
            OSError: a task cannot begin, or its processes died MOST_DEATHS times.
            ConnectionError: no node with processors is left.
        """
        found: list[T | None] = [None] * len(tasks)
        deaths = [0] * len(tasks)

        def begin(number: int) -> Any:
            return self._run.remote(self._versions, shared, function, *tasks[number])

        waiting = {begin(number): number for number in range(len(tasks))}
        try:
            while waiting and not should_end(len(tasks) - len(waiting)):
                done, _ = self._ray.wait([*waiting], num_returns=len(waiting), timeout=POLL_S)
                for reference in done:
                    number = waiting.pop(reference)
                    try:
                        found[number] = self._result(reference)
                    except self._losses as error:
                        deaths[number] += 1
                        _check_deaths(deaths[number], error)
                        waiting[begin(number)] = number
                if waiting and not self.processors:
                    raise ConnectionError("the Ray cluster has lost all nodes with processors")
        finally:
            for reference in waiting:
                self._ray.cancel(reference)
        return found

    @property
    def _losses(self) -> tuple[type[Exception], ...]:
        """Return the errors of a task whose process died, or whose result died with its node."""
        errors = self._ray.exceptions
        return (
            errors.WorkerCrashedError,
            errors.OutOfMemoryError,
            errors.NodeDiedError,
            errors.ObjectLostError,
        )

    def _result(self, reference: Any) -> Any:
        """Return the result of a finished task, or raise its error."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except self._losses:
            raise
        except errors.RayError as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, ImportError | errors.RayError):  # it did not even begin
                raise OSError(
                    f"a node of the Ray cluster cannot run the task: {_first_line(cause)}"
                ) from error
            raise cause from error

    def _check_nodes(self) -> None:
        """Run a task on each node with processors, which raises an error for other versions."""
        strategies: Any = import_module("ray.util.scheduling_strategies")
        names = {
            node["NodeID"]: f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU")
        }
        if not names:
            raise ConnectionError("the Ray cluster has no node with a processor")
        task = self._ray.remote(num_cpus=0, max_retries=0)(versions)
        waiting = {
            task.options(
                scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(key, soft=False)
            ).remote(): name
            for key, name in names.items()
        }
        end = time.monotonic() + START_S
        while waiting:
            left_s = max(end - time.monotonic(), 0.0)
            done, _ = self._ray.wait([*waiting], timeout=left_s)
            if not done:
                raise ConnectionError(
                    f"node {next(iter(waiting.values()))} of the Ray cluster runs no task within "
                    f"{START_S:g} s"
                )
            self._check_node(waiting.pop(done[0]), done[0])

    def _check_node(self, name: str, answer: Any) -> None:
        errors = self._ray.exceptions
        try:
            theirs = self._ray.get(answer)
        except (errors.NodeDiedError, errors.TaskUnschedulableError, errors.WorkerCrashedError):
            return  # it is gone, and with it the tasks that it would get
        except errors.RayError as error:
            raise ValueError(
                f"node {name} of the Ray cluster cannot run placer {VERSION}: {_last_line(error)}"
            ) from error
        check_versions(name, self._versions, theirs)


def address_of(workers: str) -> str:
    """Return the address in ``"ray://HOST:PORT"``, "" for ``"ray"``.

    >>> address_of("ray://node7:6379")
    'node7:6379'
    """
    host, _, port = workers.removeprefix(SCHEME).rpartition(":")
    if workers == "ray":
        return ""
    if not (workers.startswith(SCHEME) and host and port.isdecimal()):
        raise ValueError(
            f"workers is {workers!r}, neither a number nor 'ray' or '{SCHEME}HOST:{PORT}'"
        )
    return f"{host}:{port}"


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    others = ("torch", "numpy", "numba")
    return {"placer": VERSION, **{name: version(name) for name in others}}


def check_versions(node: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise a ValueError that names the node if it has other versions than this process."""
    for name, own in ours.items():
        if theirs.get(name) != own:
            raise ValueError(
                f"node {node} of the Ray cluster has {name} {theirs.get(name)}, but this process "
                f"has {name} {own}: install the same version on all nodes"
            )


def _check_deaths(deaths: int, last: Exception) -> None:
    if deaths >= MOST_DEATHS:
        raise OSError(
            f"a task died {deaths} times on the Ray cluster: is there memory for one on each "
            f"processor of every node? The last time: {_first_line(last)}"
        ) from last


def _connect(ray: Any, address: str) -> None:
    if not address:
        _start_ray(ray)
        return
    if address != "auto":
        _check_answers(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"the Ray cluster at {address} cannot be used: {_last_line(error)}"
        ) from error


def _check_answers(address: str) -> None:
    """Raise an error within ANSWER_S seconds if Ray cannot connect, which itself takes a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is no address of a Ray cluster: give {SCHEME}HOST:{PORT}")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(
            f"nothing answers at {address}, where a Ray cluster should be: {error}"
        ) from error
    outcomes: list[Exception | None] = []
    probe = threading.Thread(target=_probe, args=(address, outcomes), daemon=True)
    probe.start()
    probe.join(ANSWER_S)
    if not outcomes:
        raise ConnectionError(
            f"what answers at {address} is no head of a Ray cluster; its port is {PORT} unless "
            "ray start got another"
        )
    if outcomes[0] is not None:
        raise ConnectionError(
            f"this machine is no node of the Ray cluster at {address}: start one with "
            f"ray start --address={address}"
        ) from outcomes[0]


def _probe(address: str, outcomes: list[Exception | None]) -> None:
    """Append why this machine is no node of the cluster, or None; nothing if it does not answer."""
    raylet: Any = import_module("ray._raylet")
    services: Any = import_module("ray._private.services")
    try:
        client = raylet.GcsClient(address=address)
    except Exception:  # noqa: BLE001 - whatever it is, nothing has answered
        return
    try:
        services.get_node_to_connect_for_driver(client, timeout_seconds=ANSWER_S / 2)
    except RuntimeError as error:
        outcomes.append(error)
    else:
        outcomes.append(None)


def _start_ray(ray: Any) -> None:
    """Start a cluster that listens on this machine only, because its clients can run any code."""
    constants: Any = import_module("ray._private.ray_constants")
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False  # else Ray listens on a network address
    try:
        ray.init("local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    finally:
        constants.ENABLE_RAY_CLUSTER = before
    addresses = {node["NodeManagerAddress"] for node in ray.nodes()}
    if addresses != {LOOPBACK}:
        ray.shutdown()
        raise ConnectionError(
            f"Ray listens on {', '.join(sorted(addresses))}, where others may reach it: start a "
            "cluster yourself and give its address"
        )


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


_prepared: dict[str, Any] = {}
"""In a process of a node: the last shared value, prepared, by its id."""


def _run(expected: Mapping[str, str], shared: Shared, function: Callable[..., T], *task: Any) -> T:
    """Run a task on a node, which may have joined after the others were checked."""
    ray: Any = import_module("ray")
    check_versions(ray.util.get_node_ip_address(), expected, versions())
    [reference] = shared.reference
    key = reference.hex()
    if key not in _prepared:
        _prepared.clear()
        _prepared[key] = shared.prepare(ray.get(reference))
    return function(_prepared[key], *task)

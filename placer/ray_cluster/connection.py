"""Connection to a Ray cluster, whose nodes run tasks (extra: cluster).

Tasks are stateless, so that another node can redo those of a node that dies, with the same results.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from graphs.text import first_line
from placer.ray_cluster.address import (
    SCHEME,
    ClusterError,
    NodesLostError,
    connect,
    last_line,
    signal_handlers_kept,
)
from placer.startup import VERSION

MOST_DEATHS: Final = 5
"""Times that the process or the node of a task may die."""
START_S: Final = 60.0
"""Time in which every node must run a first task: its process has to start."""
POLL_S: Final = 0.2

T = TypeVar("T")
ShouldEnd: TypeAlias = Callable[[int], bool]


class Shared(NamedTuple):
    """A value that tasks use, and the function that prepares it once in every process."""

    reference: list[Any]  # in a list: Ray would fetch the value with every task
    prepare: Callable[..., Any]


class Node(NamedTuple):
    """A node of the cluster with the processors and GPUs that it offers; it runs tasks by name."""

    key: str
    name: str  # HOST:PORT
    cpus: int
    gpus: int


class LostError(ConnectionError):
    """A node died, or the process there that ran something, or a result with its node."""


class NodeProcess:
    """A process of a node that holds a prepared value; its calls run one after the other."""

    def __init__(self, ray: Any, actor: Any, node: Node) -> None:
        self._ray = ray
        self._actor = actor
        self.node = node

    def call(self, function: Callable[..., object], *arguments: Any) -> Any:
        """Begin ``function(value, *arguments)``; return its result to come.

        Raises:
            LostError: the node does not answer.
        """
        with _answering(self._ray, self.node.name):
            return self._actor.call.remote(function, *arguments)

    def kill(self) -> None:
        """End it at once, unless its node is lost."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)


class RayCluster:
    """A connection to a Ray cluster; a context manager, which disconnects.

    All nodes must have this version of placer, torch, numpy and numba.
    """

    def __init__(self, address: str = "") -> None:
        """Connect to the cluster at ``address`` or ``$RAY_ADDRESS``, or start a local one.

        The address is ``HOST:PORT`` of the head node, also with ``ray://`` before it. This machine
        must be a node of the cluster.

        Raises:
            ValueError: Ray is not installed.
            ClusterError: nothing answers, a node has other versions or cannot run placer.
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
                with signal_handlers_kept():
                    connect(ray, address.removeprefix(SCHEME))
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
        with self._answering_here():
            return int(self._ray.cluster_resources().get("CPU", 0))

    def share(self, value: object, prepare: Callable[..., Any]) -> Shared:
        """Return a value for tasks, which each process fetches and prepares once."""
        with self._answering_here():
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
            NodesLostError: no node with processors is left.
            ConnectionError: this machine's node does not answer.
        """
        found: list[T | None] = [None] * len(tasks)
        deaths = [0] * len(tasks)

        def begin(number: int) -> Any:
            with self._answering_here():
                return self._run.remote(self._versions, shared, function, *tasks[number])

        waiting = {begin(number): number for number in range(len(tasks))}
        try:
            while waiting and not should_end(len(tasks) - len(waiting)):
                for reference in self.done([*waiting], at_least=len(waiting)):
                    number = waiting.pop(reference)
                    try:
                        found[number] = self.result(reference)
                    except LostError as error:
                        deaths[number] += 1
                        check_task_deaths(deaths[number], error)
                        waiting[begin(number)] = number
                if waiting and not self.processors:
                    raise NodesLostError(found)
        finally:
            with suppress(self._ray.exceptions.RayError):
                for reference in waiting:
                    self._ray.cancel(reference)
        return found

    def start(
        self, node: Node, shared: Shared, *arguments: Any, cpus: int, gpus: int
    ) -> tuple[NodeProcess, Any]:
        """Start a process on a node, which reserves processors and GPUs of it.

        Its value is what the shared one is prepared to, with ``arguments``. Returns the process
        and its first result to come, None.

        Raises:
            LostError: the node does not answer.
        """
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, **_only_on(node)}
        with _answering(self._ray, node.name):
            actor = self._ray.remote(_Holder).options(**options).remote()
            ready = actor.prepare.remote(self._versions, node.name, shared, *arguments)
        return NodeProcess(self._ray, actor, node), ready

    def done(
        self, waiting: Sequence[Any], *, timeout_s: float = POLL_S, at_least: int = 1
    ) -> list[Any]:
        """Return those of the results to come that have come, once there are enough or in time."""
        if not waiting:
            return []
        with self._answering_here():
            done, _ = self._ray.wait([*waiting], num_returns=at_least, timeout=timeout_s)
        return list(done)

    def result(self, reference: Any) -> Any:
        """Return a result that has come, or raise its error.

        Raises:
            LostError: its process died.
            OSError: it could not even begin.
        """
        errors = self._ray.exceptions
        losses = (
            errors.WorkerCrashedError,
            errors.OutOfMemoryError,
            errors.NodeDiedError,
            errors.ObjectLostError,
            errors.ActorDiedError,
            errors.ActorUnavailableError,
            errors.ActorUnschedulableError,
        )
        try:
            return self._ray.get(reference)
        except losses as error:
            raise LostError(first_line(error)) from error
        except errors.RayError as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, ImportError | errors.RayError):  # it did not even begin
                raise OSError(
                    f"a node of the Ray cluster cannot run the task: {first_line(cause)}"
                ) from error
            raise cause from error

    @property
    def nodes(self) -> list[Node]:
        """Return the nodes with processors that are alive."""
        with self._answering_here():
            nodes = self._ray.nodes()
        return [
            Node(
                key=node["NodeID"],
                name=f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}",
                cpus=int(node["Resources"]["CPU"]),
                gpus=int(node["Resources"].get("GPU", 0)),
            )
            for node in nodes
            if node["Alive"] and node["Resources"].get("CPU")
        ]

    def ask(self, function: Callable[[], T]) -> dict[Node, T]:
        """Return ``function()`` of each node with processors, without those that die meanwhile.

        Raises:
            ClusterError: there is no such node, or one cannot run the function, or not in time.
        """
        nodes = self.nodes
        if not nodes:
            raise ClusterError("the Ray cluster has no node with a processor")
        task = self._ray.remote(num_cpus=0, max_retries=0)(function)
        waiting = {}
        for node in nodes:
            with suppress(LostError), _answering(self._ray, node.name):
                waiting[task.options(**_only_on(node)).remote()] = node
        end = time.monotonic() + START_S
        answers: dict[Node, T] = {}
        errors = self._ray.exceptions
        while waiting:
            done = self.done([*waiting], timeout_s=max(end - time.monotonic(), 0.0))
            if not done:
                raise ClusterError(
                    f"node {next(iter(waiting.values())).name} of the Ray cluster runs no task "
                    f"within {START_S:g} s"
                )
            node = waiting.pop(done[0])
            try:
                answers[node] = self._ray.get(done[0])
            except (errors.NodeDiedError, errors.TaskUnschedulableError, errors.WorkerCrashedError):
                continue  # it is gone, and with it the tasks that it would get
            except errors.RayError as error:
                raise ClusterError(
                    f"node {node.name} of the Ray cluster cannot run placer {VERSION}: "
                    f"{last_line(error)}"
                ) from error
        return answers

    def _answering_here(self) -> AbstractContextManager[None]:
        """Turn errors of Ray into one that names the node of this machine."""
        return _answering(self._ray, f"{self._ray.util.get_node_ip_address()}, this machine,")

    def _check_nodes(self) -> None:
        """Raise an error if a node has other versions."""
        for node, theirs in self.ask(versions).items():
            check_versions(node.name, self._versions, theirs)


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    others = ("torch", "numpy", "numba")
    return {"placer": VERSION, **{name: version(name) for name in others}}


def check_versions(node: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise a ClusterError that names the node if it has other versions than this process."""
    for name, own in ours.items():
        if theirs.get(name) != own:
            raise ClusterError(
                f"node {node} of the Ray cluster has {name} {theirs.get(name)}, but this process "
                f"has {name} {own}: install the same version on all nodes"
            )


def check_task_deaths(deaths: int, last: LostError) -> None:
    """Raise OSError if what ran a task on a Ray cluster died too often."""
    check_deaths(deaths, last, "a task on the Ray cluster", "one on each processor of every node")


def check_deaths(deaths: int, last: Exception, what: str, room: str) -> None:
    """Raise OSError if ``what`` has died too often; it asks for memory for ``room``."""
    if deaths >= MOST_DEATHS:
        raise OSError(
            f"{what} died {deaths} times: is there memory for {room}? The last time: {last}"
        ) from last


@contextmanager
def _answering(ray: Any, node: str) -> Iterator[None]:
    """Turn errors of Ray into a LostError that names the node."""
    try:
        yield
    except ray.exceptions.RayError as error:
        raise LostError(
            f"node {node} of the Ray cluster does not answer: {first_line(error)}"
        ) from error


def _only_on(node: Node) -> dict[str, Any]:
    """Return the options of a task that no other node may run."""
    strategies: Any = import_module("ray.util.scheduling_strategies")
    affinity = strategies.NodeAffinitySchedulingStrategy(node.key, soft=False)
    return {"scheduling_strategy": affinity}


_prepared: dict[str, Any] = {}
"""In a process of a node: the last shared value, prepared, by its id."""


def _run(expected: Mapping[str, str], shared: Shared, function: Callable[..., T], *task: Any) -> T:
    """Run a task on a node, which may have joined after the others were checked."""
    node = import_module("ray").util.get_node_ip_address()
    check_versions(node, expected, versions())
    key = shared.reference[0].hex()
    if key not in _prepared:
        _prepared.clear()
        _prepared[key] = shared.prepare(_fetched(shared, node))
    return function(_prepared[key], *task)


def _fetched(shared: Shared, node: str) -> Any:
    """Return a shared value on a node.

    Raises:
        OSError: the node cannot import what the value needs; the message names it.
    """
    ray: Any = import_module("ray")
    try:
        return ray.get(shared.reference[0])
    except ray.exceptions.RaySystemError as error:
        raise OSError(
            f"node {node} of the Ray cluster cannot run the task: {first_line(error)}"
        ) from error


class _Holder:
    """In a process of a node: a value, and what is called with it."""

    def prepare(
        self, expected: Mapping[str, str], node: str, shared: Shared, *arguments: Any
    ) -> None:
        """Prepare the value; the versions of the node may have changed since it was checked."""
        check_versions(node, expected, versions())
        self._value = shared.prepare(_fetched(shared, node), *arguments)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what the function returns for the value."""
        return function(self._value, *arguments)

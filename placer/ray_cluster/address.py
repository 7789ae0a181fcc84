"""Addresses of Ray clusters: what answers there is checked before Ray connects."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Final

LOOPBACK: Final = "127.0.0.1"
SCHEME: Final = "ray://"
PORT: Final = 6379
"""Port of the head of a cluster that ``ray start --head`` starts."""
ANSWER_S: Final = 6.0
"""Time in which the head of a cluster must answer; a new process takes some seconds before."""


class ClusterError(ConnectionError, ValueError):
    """The cluster that was asked for cannot be used, or one of its nodes."""


class NodesLostError(ConnectionError):
    """A cluster has lost all nodes with processors.

    ``found`` are the results that came before, None for the other tasks.
    """

    def __init__(self, found: Sequence[Any]) -> None:
        super().__init__("the Ray cluster has lost all nodes with processors")
        self.found = found


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


def connect(ray: Any, address: str) -> None:
    """Connect Ray to the cluster at ``address``; start one on this machine if it is ""."""
    if not address:
        _start_ray(ray)
        return
    if address != "auto":
        _check_answers(address)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"the Ray cluster at {address} cannot be used: {last_line(error)}"
        ) from error


def _check_answers(address: str) -> None:
    """Raise an error within ANSWER_S seconds if Ray cannot connect, which itself takes a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(f"{address!r} is no address of a Ray cluster: give {SCHEME}HOST:{PORT}")
    end_s = time.monotonic() + ANSWER_S
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"nothing answers at {address}, where a Ray cluster should be: {error}"
        ) from error
    outcomes: list[Exception | None] = []
    probe = threading.Thread(target=_probe, args=(address, outcomes), daemon=True)
    probe.start()
    probe.join(max(end_s - time.monotonic(), 0.0))
    if not outcomes:
        raise ClusterError(
            f"what answers at {address} is no head of a Ray cluster; its port is {PORT} unless "
            "ray start got another"
        )
    if outcomes[0] is not None:
        raise ClusterError(
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
def signal_handlers_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def last_line(error: Exception) -> str:
    """Return the last line of an error's message, where Ray says what happened."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__

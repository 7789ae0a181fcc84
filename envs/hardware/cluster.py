"""Devices and the links between them: made by hand, read from TOML, or discovered.

``cluster.toml``::

    format = "placer-cluster/1"
    name = "two-cores"

    [[device]]
    name = "core:0"            # kind, memory_bytes, launch_s, peak_flop_per_s,
    kind = "core"              # bandwidth_bytes_per_s and source as in Device
    memory_bytes = 8_000_000_000
    price_per_hour = 0.05      # in any currency; 0: not given
    contention = 3.1           # only if other processes used it during calibration

    [[link]]
    between = ["core:0", "core:1"]     # every ordered pair among them, or
    one_way = false                    # with true, only from the first to the second
    latency_s = 15e-6
    bandwidth_bytes_per_s = 5e9        # may be inf
    sharing = "pair"                   # none | egress | pair | bus
    full_duplex = true
    order = "fifo"                     # fifo | priority
    ports = []                         # devices that share a port of this link, list by list
    ingress = false                    # true: a transfer needs its receiver's port, too

    [[host]]                           # optional; see envs.hardware.host
    devices = ["cuda:0", "cpu"]        # one thread issues their ops
    overlap = false                    # true: copies run beside the ops

    [transfers]
    once_per_destination = true        # false: every edge is sent on its own

Two nodes whose GPUs share a network card each, with a queue per direction::

    [[link]]
    between = ["n0:g0", "n0:g1", "n1:g0", "n1:g1"]
    ports = [["n0:g0", "n0:g1"], ["n1:g0", "n1:g1"]]
    ingress = true
    latency_s = 5e-6
    bandwidth_bytes_per_s = 25e9

A link does not join devices of one port: list another for them. A link joins devices
directly; where two have none, such as GPUs that copy through the host, list one that costs as much.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from envs.hardware.core_sets import check_core_sets
from envs.hardware.host import Host, check_hosts, check_names_no_core
from envs.hardware.units import human_bytes
from graphs.strict_json import (
    array,
    fields,
    load_toml,
    number,
    of_format,
    one_of,
    text,
    whole,
    within,
)
from graphs.text import check_printable, html_table, suggestion

Sharing: TypeAlias = Literal["none", "egress", "pair", "bus"]
LinkOrder: TypeAlias = Literal["fifo", "priority"]
SHARINGS: Final[tuple[Sharing, ...]] = ("none", "egress", "pair", "bus")
LINK_ORDERS: Final[tuple[LinkOrder, ...]] = ("fifo", "priority")
FORMAT: Final = "placer-cluster/1"
_KEYS: Final = frozenset({"format", "name", "device", "link", "host", "transfers"})
_TRANSFER_KEYS: Final = frozenset({"once_per_destination"})
RARE: Final = frozenset({"ports", "ingress", "bus", "pinned_bandwidth_bytes_per_s"}) | frozenset(
    {"price_per_hour", "contention", "overlap", "autograd"}
)
"""Keys that are only written where used: other readers of the format may not know them."""
LARGEST_INT: Final = 2**63 - 1  # as TOML asks every reader to hold
LONGEST_S: Final = 2e9
"""An op, launch or latency that takes longer, 63 years, is refused."""
MOST_DEVICES: Final = 1024
"""Maximum number of devices; data per device pair, read for each edge, grows with their square."""
_RATE: Final = (1e-9, math.inf)  # so slow that any output takes a finite time
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "memory_bytes": (0, LARGEST_INT),
    "launch_s": (0, LONGEST_S),
    "latency_s": (0, LONGEST_S),
    "peak_flop_per_s": _RATE,
    "bandwidth_bytes_per_s": _RATE,
    "pinned_bandwidth_bytes_per_s": (0, math.inf),
    "price_per_hour": (0, 1e9),
    "contention": (0, 1e9),
}
"""Accepted ranges of the numbers of devices and links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device, which runs one op at a time; units are decimal."""

    name: str
    kind: str
    memory_bytes: int
    launch_s: float = 0.0  # added to every op
    peak_flop_per_s: float = math.nan  # in the dtype of the computation
    bandwidth_bytes_per_s: float = math.nan
    source: str = ""  # where the numbers come from: a data sheet, or "measured <date>"
    price_per_hour: float = 0.0  # rental, in one currency for all devices; 0: not given
    contention: float = 0.0  # wall over CPU time of its calibration; 0: quiet or unknown

    def __post_init__(self) -> None:
        if not self.name or not self.kind:
            raise ValueError(f"device {self.name!r} of kind {self.kind!r}: neither may be empty")
        check_printable(self.name, "the name of a device")
        check_printable([self.kind, self.source], f"device {self.name}: kind and source")
        for name in ("memory_bytes", "launch_s", "price_per_hour", "contention"):
            _check_range(self, name, f"device {self.name!r}")
        for name in ("peak_flop_per_s", "bandwidth_bytes_per_s"):
            if not math.isnan(getattr(self, name)):  # nan: not known
                _check_range(self, name, f"device {self.name!r}")
        if self.memory_bytes != int(self.memory_bytes):
            raise ValueError(
                f"device {self.name!r}: memory_bytes is {self.memory_bytes}, not a whole number"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between every ordered pair of the devices it names, or ``one_way`` between two.

    ``sharing`` says which transfers queue behind each other: "none" (never), "egress" (one queue
    per sender; half duplex: one port per device for both directions), "pair" (one per ordered pair;
    half duplex: per unordered pair), "bus" (one for all; links that name the same ``bus`` share
    it). Where two links name the same pair, the first listed counts. Transfers from and to
    page-locked memory have a bandwidth of their own, 0 if it is not known.

    Devices of one list in ``ports`` share a port, such as the network card of their node; every
    other device has its own. A port then takes the place of the device: it is one sender, one
    receiver, one end of a pair, and the link does not join its devices to each other. With
    ``ingress``, a transfer on a full-duplex "egress" link occupies two queues at once: outgoing at
    its sender and incoming at its receiver.
    """

    between: tuple[str, ...]
    latency_s: float
    bandwidth_bytes_per_s: float
    sharing: Sharing = "egress"
    full_duplex: bool = True
    order: LinkOrder = "fifo"
    one_way: bool = False
    ports: tuple[tuple[str, ...], ...] = ()
    ingress: bool = False
    bus: str = ""
    pinned_bandwidth_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        where = f"link between {', '.join(self.between) or 'nothing'}"
        if len(self.between) < 2 or len(set(self.between)) != len(self.between):
            raise ValueError(f"{where}: name at least two different devices")
        if self.one_way and len(self.between) > 2:
            raise ValueError(f"{where}: a one-way link leads from one device to one other")
        for name in ("latency_s", "bandwidth_bytes_per_s", "pinned_bandwidth_bytes_per_s"):
            _check_range(self, name, where)
        one_of(self.sharing, SHARINGS, f"{where}: sharing")
        one_of(self.order, LINK_ORDERS, f"{where}: order")
        check_printable(self.bus, f"{where}: bus")
        self._check_ports(where)
        if self.ingress and not (self.sharing == "egress" and self.full_duplex):
            raise ValueError(f'{where}: ingress is for full-duplex links with sharing = "egress"')
        if self.bus and self.sharing != "bus":
            raise ValueError(f'{where}: bus is for links with sharing = "bus"')

    def _check_ports(self, where: str) -> None:
        joined = set(self.between)
        for name, count in Counter(name for port in self.ports for name in port).items():
            if name not in joined:
                raise ValueError(f"{where}: ports names {name!r}, which is not in between")
            if count > 1:
                raise ValueError(f"{where}: ports names {name!r} more than once")
        if not all(self.ports):
            raise ValueError(f"{where}: a list in ports is empty")
        if any(len(port) == len(self.between) for port in self.ports):
            raise ValueError(f"{where}: all devices share one port, so it joins none of them")

    def port_of(self, name: str) -> str:
        """Return the port of a device, named after the first device that shares it."""
        return next((port[0] for port in self.ports if name in port), name)

    def joins(self, source: str, destination: str) -> bool:
        """Return whether the link leads from source to destination."""
        if self.one_way:
            return (source, destination) == self.between
        if source not in self.between or destination not in self.between:
            return False
        return self.port_of(source) != self.port_of(destination)

    def among(self, names: Collection[str]) -> Link | None:
        """Return the link between those of its devices that are named, None if it joins none."""
        between = tuple(name for name in self.between if name in names)
        if len({self.port_of(name) for name in between}) < 2:
            return None
        ports = (tuple(name for name in port if name in names) for port in self.ports)
        return replace(self, between=between, ports=tuple(port for port in ports if port))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices, links and hosts; placements refer to devices by their index in ``devices``."""

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    hosts: tuple[Host, ...] = ()  # none: a process drives each device
    once_per_destination: bool = True

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError(f"cluster {self.name!r} has no devices")
        check_printable(self.name, "the name of a cluster")
        if len(self) > MOST_DEVICES:
            raise ValueError(
                f"cluster {self.name!r} has {len(self)} devices, the simulator takes at most "
                f"{MOST_DEVICES}: list fewer of them, such as those of one replica"
            )
        counts = Counter(names := self.names)
        if twice := sorted(name for name in counts if counts[name] > 1):
            raise ValueError(f"cluster {self.name!r} names {', '.join(twice)} more than once")
        for link in self.links:
            for name in link.between:
                if name not in counts:
                    raise ValueError(
                        f"cluster {self.name!r}: a link names device {name!r}; "
                        f"there are {', '.join(names)}{suggestion(name, names)}"
                    )
        try:
            check_core_sets(names)
        except ValueError as error:
            raise ValueError(f"cluster {self.name!r}: {error}") from None
        check_hosts(self.name, self.hosts, names)

    def __len__(self) -> int:
        return len(self.devices)

    def __str__(self) -> str:
        """Return the name and the devices."""
        sizes = (f"{device.name} ({human_bytes(device.memory_bytes)})" for device in self.devices)
        return f"{self.name}: {', '.join(sizes)}"

    def _repr_html_(self) -> str:
        def rate(value: float) -> str:
            return "" if math.isnan(value) else f"{value:.4g}"

        rows = (
            (
                device.name,
                device.kind,
                human_bytes(device.memory_bytes),
                rate(device.peak_flop_per_s / 1e12),
                rate(device.bandwidth_bytes_per_s / 1e9),
            )
            for device in self.devices
        )
        return html_table(self.name, ("device", "kind", "memory", "TFLOP/s", "GB/s"), rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the device names in index order."""
        return tuple(device.name for device in self.devices)

    @property
    def price_per_hour(self) -> float:
        """Return the rental price per hour of all devices together."""
        return math.fsum(device.price_per_hour for device in self.devices)

    def index(self, name: str) -> int:
        """Return the index of a device; an unknown name is a ValueError that lists the devices."""
        if name in self.names:
            return self.names.index(name)
        hint = suggestion(name, self.names)
        raise ValueError(
            f"cluster {self.name!r} has no device {name!r}: it has {', '.join(self.names)}{hint}"
        )

    def part(self, devices: Iterable[int]) -> Cluster:
        """Return the cluster of some devices (indices), in the same order, with links and hosts."""
        kept = [self.devices[d] for d in sorted(set(devices))]
        names = {device.name for device in kept}
        links = (link.among(names) for link in self.links)
        hosts = (host.among(names) for host in self.hosts)
        return replace(
            self,
            devices=tuple(kept),
            links=tuple(filter(None, links)),
            hosts=tuple(filter(None, hosts)),
        )

    def link_between(self, source: str, destination: str) -> Link | None:
        """Return the link from source to destination, or None."""
        for link in self.links:
            if link.joins(source, destination):
                return link
        return None


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file."""
    return load_toml(path, cluster_from_dict)


def cluster_from_dict(data: Mapping[str, Any]) -> Cluster:
    """Build a cluster from the parsed content of a cluster file."""
    top = of_format(data, FORMAT, _KEYS)
    transfers = fields(top.get("transfers", {}), "transfers", _TRANSFER_KEYS, required=())
    once = transfers.get("once_per_destination", True)
    cluster = Cluster(
        name=text(top.get("name", "cluster"), "name"),
        devices=tuple(Device(**values) for values in _records(Device, top, "device")),
        links=tuple(Link(**values) for values in _records(Link, top, "link")),
        hosts=tuple(Host(**values) for values in _records(Host, top, "host")),
        once_per_destination=_typed(once, "bool", "transfers.once_per_destination"),
    )
    check_names_no_core(cluster.name, cluster.hosts)
    return cluster


def cluster_to_toml(cluster: Cluster) -> str:
    """Encode a cluster as a cluster file; :func:`load_cluster` reads it back unchanged."""
    lines = [f'format = "{FORMAT}"', f"name = {_toml(cluster.name)}"]
    tables: tuple[tuple[str, tuple[Device | Link | Host, ...]], ...] = (
        ("device", cluster.devices),
        ("link", cluster.links),
        ("host", cluster.hosts),
    )
    for table, items in tables:
        for item in items:
            lines += ["", f"[[{table}]]"]
            values = {f.name: getattr(item, f.name) for f in dataclass_fields(item)}
            lines += [f"{key} = {_toml(v)}" for key, v in values.items() if not _omitted(key, v)]
    lines += ["", "[transfers]", f"once_per_destination = {_toml(cluster.once_per_destination)}"]
    return "\n".join(lines) + "\n"


def _omitted(key: str, value: object) -> bool:
    """Return whether a key is omitted: nan, which would not equal itself, or an unused rare key."""
    return (isinstance(value, float) and math.isnan(value)) or (key in RARE and not value)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):  # also numpy's, whose repr names its type
        return repr(float(value))
    return str(value)


def _records(
    kind: type[Device] | type[Link] | type[Host], top: Mapping[str, Any], key: str
) -> Iterator[dict[str, Any]]:
    """Yield the fields of every device, link or host of a file, by name."""
    types = {field.name: str(field.type) for field in dataclass_fields(kind)}
    required = [field.name for field in dataclass_fields(kind) if field.default is MISSING]
    for i, item in enumerate(array(top.get(key, []), key)):
        where = f"{key}[{i}]"
        values = fields(item, where, frozenset(types), required)
        yield {
            name: _typed(value, types[name], f"{where}.{name}") for name, value in values.items()
        }


def _typed(value: object, annotation: str, where: str) -> Any:
    match annotation:
        case "float":
            return number(value, where)
        case "int":
            return whole(value, where)
        case "bool":
            if not isinstance(value, bool):
                raise ValueError(f"{where} is {value!r}, not true or false")
            return value
        case "tuple[str, ...]":
            return tuple(text(item, f"{where}[{i}]") for i, item in enumerate(array(value, where)))
        case "tuple[tuple[str, ...], ...]":
            lists = enumerate(array(value, where))
            return tuple(_typed(item, "tuple[str, ...]", f"{where}[{i}]") for i, item in lists)
        case _:
            return text(value, where)


def _check_range(values: Device | Link, name: str, where: str) -> None:
    within(getattr(values, name), *RANGES[name], f"{where}: {name}")

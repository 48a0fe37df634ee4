"""Seconds of a collective from the bytes it moves and the way its group is joined.

Pure functions of numbers: no jax. `groups.py` says how a group is joined.

V is the size of the whole array in a group: what an all-gather gives, what a reduce-scatter or an
all-reduce takes, what all members of an all-to-all hold together. A collective-permute, a send and
a host transfer count the bytes of one device.

Sources: rings, lines and several axes after "How to Scale Your Model", chapters on TPUs, sharding
and GPUs (jax-ml.github.io/scaling-book). Lines of an all-to-all, links shared by strided groups and
axes of unequal rates are the same arguments carried on: the busiest link, or the worst-placed chip.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fornax.hlo import Calibration, calibration_of
from fornax.mesh.hardware import Chip

ON_CHIP = 6.0
"""Rate between the two devices of a chip over that of one link (Google's page on TPU7x)."""


@dataclass(frozen=True, kw_only=True)
class PhysicalAxis:
    """A group's members along one dimension of a torus."""

    dimension: int
    """Which dimension of the slice."""
    size: int
    """Members along it."""
    ring: bool
    """Whether the members close a ring over the wrap-around link."""
    share: float = 1.0
    """Groups whose traffic meets on every link."""
    way: Literal[-1, 0, 1] = 0
    """The one direction that is used, or 0 for both."""

    @property
    def links(self) -> float:
        """Links, one way, over which the worst-placed member is fed at once."""
        return (2.0 if self.ring else 1.0) / self.share

    @property
    def hops(self) -> int:
        """Steps from one member to the farthest."""
        return self.size // 2 if self.ring else self.size - 1


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """How the members of one group are joined: on a chip, along axes of a torus or over a switch,
    across slices."""

    cores: int = 1
    """Members on one chip."""
    axes: tuple[PhysicalAxis, ...] = ()
    """Dimensions of the torus that the group has several members along."""
    switched: int = 1
    """Members joined by one switch (GPUs of one server)."""
    slices: int = 1
    """Slices, or GPU servers, that the group has members in."""
    regular: bool = True
    """False when the members fill no box of the torus; the times are then those of the box."""
    shared: float = 1.0
    """Groups that a chip has members in: they share its links to the outside and to the host."""
    switch: bool = False
    """Whether the chips are connected to switches (GPUs) rather than in a torus."""

    @property
    def chips(self) -> int:
        """Members' chips in one slice or server."""
        count = self.switched
        for axis in self.axes:
            count *= axis.size
        return count

    @property
    def size(self) -> int:
        """Members, when the group is regular."""
        return self.cores * self.chips * self.slices


@dataclass(frozen=True, kw_only=True)
class Network:
    """What the links of one chip carry, as far as programs reach it."""

    link: float
    """Bytes per second, one way, of one link of the torus, or of a GPU into its switch."""
    outside: float
    """Bytes per second, one way, of a chip's share of the network between slices or servers."""
    host: float
    """Bytes per second, one way, between a chip and its host's memory."""
    hop_seconds: float = 1e-6
    """Least time of one step between neighbours."""
    outside_seconds: float = 2e-5
    """Least time of one exchange between slices or servers."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Time of one collective."""

    seconds: float
    """From its start to its end on idle links."""
    by_link: Mapping[str, float]
    """Seconds each kind of link is busy: `chip` inside a chip, `ici` between chips of a slice,
    `dcn` between slices, `nvlink` between GPUs of a server, `network` between servers, `host` to
    the host's memory."""
    links: tuple[str, ...]
    """Queues it occupies: `ici:0+` and `ici:0-` for the two ways along dimension 0 of the torus,
    `dcn`, `host`, ..."""

    @property
    def link(self) -> str:
        """The kind of link that takes longest."""
        return max(self.by_link, key=lambda name: self.by_link[name]) if self.by_link else "chip"


def network_of(chip: Chip, calibration: Calibration | None = None) -> Network:
    """The rates that programs reach on a chip's links."""
    known = calibration or calibration_of(chip)
    return Network(
        link=chip.link_bandwidth * known.links,
        outside=chip.network_bandwidth * known.outside,
        host=chip.host_bandwidth * known.host,
        hop_seconds=known.hop_seconds,
    )


def collective_seconds(kind: str, size: float, layout: GroupLayout, network: Network) -> Transfer:
    """Time of one collective in every group at once.

    Args:
      kind: a `CollectiveKind` of `fornax.hlo`.
      size: V in bytes; for collective-permute, send-recv and host-transfer the bytes of one device.
      layout: how each group is joined.
      network: rates.

    Raises:
      ValueError: for a kind that is not known.
    """
    if kind == "host-transfer":
        return _transfer({"host": size * layout.shared / network.host}, ("host",))
    if kind not in _PASSES and kind not in ("all-to-all", "collective-permute", "send-recv"):
        raise ValueError(f"collective {kind!r} is not known")
    if kind == "send-recv" or (kind == "collective-permute" and layout.slices > 1):
        name = "network" if layout.switch else "dcn"
        outside = size * layout.shared / network.outside + network.outside_seconds
        return _transfer({name: outside}, (name,))
    if kind == "collective-permute":
        return _neighbours(size, layout, network)
    if layout.size <= 1:
        return _transfer({}, ())
    if kind == "all-to-all":
        return _exchange(size, layout, network)
    return _gather(size, layout, network, _PASSES[kind])


_PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""An all-reduce is a reduce-scatter and an all-gather."""


def _gather(size: float, layout: GroupLayout, network: Network, passes: int) -> Transfer:
    """All-gather, or reduce-scatter, its mirror; `passes` of them.

    Every chip must receive what it lacks over the links it has: V (n - 1) / n, the slices' parts
    first and divided over the group's chips, then the rest inside the slice.
    """
    busy: dict[str, float] = {}
    inside = _inside_name(layout)
    if layout.slices > 1:
        lacks = size * layout.shared / layout.chips * (layout.slices - 1) / layout.slices
        outside = lacks / network.outside + network.outside_seconds
        busy["network" if layout.switch else "dcn"] = passes * outside
    if layout.chips > 1:
        lacks = size * (layout.chips - 1) / layout.chips
        busy[inside] = passes * (lacks / _rate(layout, network) + _latency(layout, network))
    if layout.cores > 1:
        lacks = size * (layout.cores - 1) / layout.cores
        busy["chip"] = passes * (lacks / (ON_CHIP * network.link) + network.hop_seconds)
    return _transfer(busy, _queues(layout), together=layout.switch)


def _exchange(size: float, layout: GroupLayout, network: Network) -> Transfer:
    """All-to-all: the busiest cut of the torus, beside what leaves the slice."""
    busy: dict[str, float] = {}
    if layout.slices > 1:
        leaves = size * layout.shared / (layout.slices * layout.chips)
        leaves *= (layout.slices - 1) / layout.slices
        name = "network" if layout.switch else "dcn"
        busy[name] = leaves / network.outside + network.outside_seconds
    if layout.switched > 1:
        leaves = size / layout.slices / layout.chips * (layout.chips - 1) / layout.chips
        busy["nvlink"] = leaves / network.link + network.hop_seconds
    if layout.axes:
        whole = size / layout.slices
        cuts = (
            whole / 4 * axis.size / layout.chips / (axis.links * network.link)
            for axis in layout.axes
        )
        busy["ici"] = max(cuts) + _latency(layout, network)
    if layout.cores > 1 and layout.chips == 1:
        busy["chip"] = size / layout.slices / 4 / (ON_CHIP * network.link) + network.hop_seconds
    return _transfer(busy, _queues(layout), together=True)


def _neighbours(size: float, layout: GroupLayout, network: Network) -> Transfer:
    """A shift by one place along the group: one link, or all the way back along a line."""
    if layout.chips == 1:
        seconds = size / (ON_CHIP * network.link) + network.hop_seconds
        return _transfer({"chip": seconds}, ())
    share = max((axis.share for axis in layout.axes), default=1.0)
    hops = max((1 if axis.ring else axis.hops for axis in layout.axes), default=1)
    seconds = size * share / network.link + hops * network.hop_seconds
    return _transfer({_inside_name(layout): seconds}, _queues(layout))


def _inside_name(layout: GroupLayout) -> str:
    return "nvlink" if layout.switch else "ici"


def _rate(layout: GroupLayout, network: Network) -> float:
    """Bytes per second into the worst-placed chip of a group from its own slice."""
    if layout.switch:
        return network.link
    return network.link * sum(axis.links for axis in layout.axes)


def _latency(layout: GroupLayout, network: Network) -> float:
    hops = 1 if layout.switch else sum(axis.hops for axis in layout.axes)
    return hops * network.hop_seconds


def _queues(layout: GroupLayout) -> tuple[str, ...]:
    """The queues that a collective of this layout uses."""
    names = [
        f"ici:{axis.dimension}{way}"
        for axis in layout.axes
        for way in {-1: "-", 0: "+-", 1: "+"}[axis.way]
    ]
    if layout.switch and layout.switched > 1:
        names.append("nvlink")
    if layout.slices > 1:
        names.append("network" if layout.switch else "dcn")
    return tuple(names)


def _transfer(
    busy: dict[str, float], queues: tuple[str, ...], *, together: bool = False
) -> Transfer:
    """`together`: all levels run at once in pieces, as NCCL's rings do. Otherwise what leaves the
    slice comes before or after what stays; inside it a chip's own link runs beside the torus."""
    inside = max((t for name, t in busy.items() if name in ("ici", "chip")), default=0.0)
    others = [t for name, t in busy.items() if name not in ("ici", "chip")]
    total = max([inside, *others]) if together else inside + sum(others)
    return Transfer(seconds=total, by_link=busy, links=queues)

"""A hardware file from what a node says of itself: `nvidia-smi topo -m`, `ibstat`. Nothing is run."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cost_models import DeviceHardware, load_hardware
from ir.core.errors import ErrorKind, usage_error
from ir.core.files import FileErrors, read_text

TOPO = FileErrors("what nvidia-smi topo -m prints", ErrorKind.HARDWARE, "--topo", fix="nvidia-smi topo -m > topo.txt")
IBSTAT = FileErrors("what ibstat prints", ErrorKind.HARDWARE, "--ibstat", fix="ibstat > ibstat.txt")
# Nearest first: what a GPU and a NIC have between them.
_NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
_WORD = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS")
_NAME = re.compile(r"(GPU|NIC)\d{1,3}|mlx\d+_\w+")
_LINK_GBPS = {"b200-sxm": 50.0, "b300-sxm": 50.0, "gb200-nvl72": 50.0, "gb300-nvl72": 50.0}  # NVLink 5; else 25
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_IB = re.compile(r"^\s*(CA '([^']{1,64})'|(State|Physical state|Rate|Link layer):\s*(.{0,64}?))\s*$")


@dataclass
class LinkFindings:
    """What was read of a cluster's links, and what was not. Entries: {what, value, note}."""

    base: DeviceHardware
    keys: dict[str, Any] = field(default_factory=dict)
    read: list[dict[str, Any]] = field(default_factory=list)
    assumed: list[dict[str, Any]] = field(default_factory=list)
    unknown: list[dict[str, Any]] = field(default_factory=list)

    def sets(self, key: str, value: float, note: str) -> None:
        """A key of the hardware file, as it was read."""
        self.keys[key] = value
        self.read.append({"what": key, "value": value, "note": note})

    def takes(self, key: str, note: str) -> None:
        """A key that the preset says."""
        self.assumed.append({"what": key, "value": getattr(self.base, key), "note": note})

    def file(self) -> dict[str, Any]:
        """The hardware file: what differs from the preset."""
        sources = {x["what"]: x["note"] for x in self.read if x["what"] in self.keys}
        return {"base": self.base.name, **self.keys, "sources": sources}


def cluster_links(
    gpu: str, topo: str | None = None, ibstat: str | None = None, oversubscription: float | None = None
) -> LinkFindings:
    """What a preset's links are on this cluster. topo, ibstat: files.

    Raises PiperError (hardware, io): an unknown preset, files that are something else.
    """
    found = LinkFindings(load_hardware(gpu))
    matrix = _matrix(read_text(topo, TOPO), topo) if topo is not None else {}
    ports = _ports(read_text(ibstat, IBSTAT), ibstat) if ibstat is not None else {}
    if matrix:
        _gpus(found, matrix)
    else:
        for key in ("gpus_per_node", "nvlink_GBps"):
            found.takes(key, "no --topo: as usual for this GPU")
    if ports:
        _nics(found, matrix, ports)
    else:
        found.takes("nic_Gbps", "no --ibstat: as usual for this GPU")
    if oversubscription is None:
        found.takes("oversubscription", "no --oversubscription: uplinks carry all that NICs send")
    else:
        found.sets("oversubscription", oversubscription, "--oversubscription")
    if found.keys.get("oversubscription", 1) > 1:
        note = (
            'nodes under one leaf: give it in [cluster], interference = "maxmin" in [costs], or no uplink is ever full'
        )
        found.unknown.append({"what": "leaf_nodes", "value": None, "note": note})
    return found


def _matrix(text: str, file: str | None) -> dict[str, dict[str, str]]:
    """Row -> column -> what is between them, of GPUs and NICs; NICs by their names where a legend gives them."""
    columns: list[str] = []
    out: dict[str, dict[str, str]] = {}
    legend = dict(re.findall(r"(NIC\d{1,3}):\s*(\S{1,64})", text))
    for line in _ANSI.sub("", text).splitlines():
        cells = line.split()
        names = [c for c in cells if _NAME.fullmatch(c)]
        if not columns and len(names) > 1 and cells[0] == names[0] == "GPU0":
            columns = names
        elif columns and cells and cells[0] in columns:
            row = cells[1 : len(columns) + 1]
            if len(row) < len(columns) or not all(map(_WORD.fullmatch, row)):
                message = f"the row of {cells[0]} has no word for each of its {len(columns)} columns"
                raise TOPO.wrong(message, file, None, f"X, NV<number>, {', '.join(_NEAR)}", TOPO.fix)
            out[cells[0]] = dict(zip(columns, row, strict=True))
    if not out:
        raise TOPO.wrong("no matrix of GPUs", file, None, "a line that begins with GPU0, and a row for each", TOPO.fix)
    return {legend.get(r, r): {legend.get(c, c): v for c, v in row.items()} for r, row in out.items()}


def _gpus(found: LinkFindings, matrix: Mapping[str, Mapping[str, str]]) -> None:
    gpus = [r for r in matrix if r.startswith("GPU")]
    if len(gpus) != found.base.gpus_per_node:
        found.takes("nvlink_few", f"fitted on nodes of {found.base.gpus_per_node}")
    found.sets("gpus_per_node", len(gpus), "nvidia-smi topo: rows")
    pairs = Counter(matrix[a][b] for a in gpus for b in gpus if a != b)
    bonds = sorted({int(w[2:]) for w in pairs if w.startswith("NV")})
    each = _LINK_GBPS.get(found.base.name, 25.0)
    if pairs and sum(n for w, n in pairs.items() if w.startswith("NV")) < pairs.total():
        found.sets("nvlink_sharp_efficiency", 0.0, "no switch that could reduce")
    if not bonds and pairs:
        found.sets("nvlink_GBps", found.base.pcie_GBps, f"nvidia-smi topo: no NVLink, so PCIe ({_said(pairs)})")
        found.takes("nvlink_efficiency", "of NVLink: PCIe between GPUs was not measured")
    elif pairs and (len(bonds) > 1 or sum(n for w, n in pairs.items() if w.startswith("NV")) < pairs.total()):
        found.unknown.append({"what": "nvlink_GBps", "value": _said(pairs), "note": "not all pairs are joined alike"})
        found.takes("nvlink_GBps", "one number cannot say it: give nvlink_GBps in [cluster]")
    elif bonds:
        _bonds(found, bonds[0], len(gpus), each)


def _bonds(found: LinkFindings, links: int, gpus: int, each: float) -> None:
    whole = round(found.base.nvlink_GBps / each)
    note = f"nvidia-smi topo: NV{links} between all pairs, {each:g} GB/s per link and direction"
    if links * (gpus - 1) <= whole and gpus > 2:  # no switch: a GPU's links are divided among its peers
        found.sets("nvlink_GBps", links * (gpus - 1) * each, note + ", without a switch")
        found.sets("nvlink_pair_GBps", links * each, note)
        found.sets("nvlink_sharp_efficiency", 0.0, "no switch that could reduce")
    else:
        found.sets("nvlink_GBps", links * each, note)


def _said(pairs: Mapping[str, int]) -> str:
    return ", ".join(f"{word} {n // 2} pairs" for word, n in sorted(pairs.items()))


@dataclass
class _Port:
    """A NIC's port, as ibstat says it."""

    active: bool = False
    up: bool = False
    gbps: float = 0.0
    layer: str = "InfiniBand"


def _ports(text: str, file: str | None) -> dict[str, list[_Port]]:
    out: dict[str, list[_Port]] = {}
    ports: list[_Port] | None = None
    for m in filter(None, map(_IB.match, text.splitlines())):
        if m[2] is not None:
            ports = out.setdefault(m[2], [])
        elif ports is not None and m[3] == "State":
            ports.append(_Port(active=m[4].lower() == "active"))
        elif ports and m[3] == "Physical state":
            ports[-1].up = m[4].lower() == "linkup"
        elif ports and m[3] == "Rate" and re.fullmatch(r"\d{1,4}", m[4]):
            ports[-1].gbps = float(m[4])
        elif ports and m[3] == "Link layer":
            ports[-1].layer = m[4]
    if not out:
        raise IBSTAT.wrong("no channel adapter", file, None, "blocks that begin with CA 'mlx5_0'", IBSTAT.fix)
    return out


def _nics(found: LinkFindings, matrix: Mapping[str, Mapping[str, str]], ports: Mapping[str, Sequence[_Port]]) -> None:
    """The rate of the NICs that stand nearest to GPUs, over the GPUs; what is left out is said."""
    gpus = [r for r in matrix if r.startswith("GPU")]
    rate = {name: sum(p.gbps for p in own if p.active and p.up) for name, own in ports.items()}
    near = {name: _nearest(matrix, gpus, name) for name in rate}
    best = min((near[n] for n, r in rate.items() if r), default=len(_NEAR))
    used = [n for n, r in rate.items() if r and (not gpus or near[n] <= max(best, 1))]
    fastest = max((rate[n] for n in used), default=0.0)
    used = [n for n in used if rate[n] == fastest]
    for name in sorted(set(rate) - set(used)):
        why = "slower, or farther from GPUs: taken to be for storage" if rate[name] else "not active"
        found.unknown.append({"what": name, "value": f"{rate[name]:g} Gb/s", "note": why})
    if not used:
        raise IBSTAT.wrong("no port that is active", None, None, "State: Active and Physical state: LinkUp", IBSTAT.fix)
    each = len(gpus) or found.base.gpus_per_node
    layers = sorted({p.layer for n in used for p in ports[n]})
    note = f"ibstat: {len(used)} x {fastest:g} Gb/s ({', '.join(layers)}) over {each} GPUs"
    found.sets("nic_Gbps", len(used) * fastest / each, note)
    if "Ethernet" in layers:
        found.takes("nic_efficiency", "of InfiniBand: RoCE may do worse; nccl-tests would tell")


def _nearest(matrix: Mapping[str, Mapping[str, str]], gpus: Sequence[str], name: str) -> int:
    words = [matrix[g][name] for g in gpus if name in matrix[g]]
    return min((_NEAR.index(w) for w in words if w in _NEAR), default=len(_NEAR))


def check_nodes(nodes: int) -> int:
    """--nodes. Raises PiperError (usage): none."""
    if nodes < 1:
        raise usage_error("--nodes", f"{nodes} nodes", allowed="1 or more")
    return nodes

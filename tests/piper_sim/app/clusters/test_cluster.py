"""`piper-sim cluster`: what a node says of itself becomes the hardware file that a job names."""

from pathlib import Path
from typing import Any

import pytest

from piper_sim import load_job
from piper_sim.pricing.prepare import hardware_of
from tests.piper_sim.study.calibrate.nccl_text import table


def topo(links: str, gpus: int = 4, nics: int = 4) -> str:
    """nvidia-smi topo -m, of a node where NIC i stands beside GPU i; one more NIC is farther away."""
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(nics + 1)]

    def word(a: int, b: int) -> str:
        if a == b:
            return " X "
        if a < gpus and b < gpus:
            return links
        return "PIX" if min(a, b) + gpus == max(a, b) else "NODE"

    lines = ["\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"]
    for a, name in enumerate(names):
        more = "\t0-55,112-167\t0" if a < gpus else ""
        lines.append(name + "\t" + "\t".join(word(a, b) for b in range(len(names))) + more)
    legend = [f"  NIC{i}: mlx5_{i}" for i in range(nics + 1)]
    return "\n".join([*lines, "", "Legend:", "  X    = Self", "  NV#  = bonded", "", "NIC Legend:", "", *legend]) + "\n"


def ibstat(*rates: tuple[float, str, str]) -> str:
    """ibstat of mlx5_0, mlx5_1 …"""
    return "".join(
        f"CA 'mlx5_{i}'\n\tCA type: MT4129\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: {state}\n"
        f"\t\tPhysical state: {'LinkUp' if state == 'Active' else 'Disabled'}\n\t\tRate: {rate:g}\n"
        f"\t\tBase lid: 31\n\t\tLink layer: {layer}\n"
        for i, (rate, state, layer) in enumerate(rates)
    )


HDR = (200.0, "Active", "InfiniBand")


def test_a_job_prices_the_links_that_were_read(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "topo").write_text(topo("NV4"))
    (tmp_path / "ib").write_text(ibstat(HDR, HDR, HDR, (10.0, "Down", "InfiniBand"), (100.0, "Active", "Ethernet")))
    (tmp_path / "nccl").write_text(table("all_reduce", lambda n: 1e-5 + n / 1e11, ranks=8, per_node=4))
    flags = [f"--{k}={tmp_path / v}" for k, v in (("topo", "topo"), ("ibstat", "ib"), ("out", "made"))]
    measured = ["--nccl-tests", str(tmp_path / "nccl"), "--oversubscription", "2"]
    found = cli("cluster", "--gpu", "a100-sxm-80gb", "--nodes", "2", *measured, *flags).json
    # HGX A100 with four GPUs has no switch: NV4 to each of three peers, 25 GB/s a link.
    hardware = {"gpus_per_node": 4, "nvlink_GBps": 300.0, "nvlink_pair_GBps": 100.0, "nic_Gbps": 150.0}
    assert {k: found["hardware"][k] for k in hardware} == hardware
    said = {e["what"] for name in ("read", "assumed", "unknown") for e in found[name]}
    assert {"mlx5_3", "mlx5_4", "oversubscription", "costs.profile"} <= said
    job = {"model": {"config": "tiny-llama"}, "cluster": {"gpu": str(tmp_path / "made/hardware.json"), "nodes": 2}}
    priced = hardware_of(load_job(job))
    assert (priced.nvlink_GBps, priced.nic_Gbps, priced.oversubscription) == (300.0, 150.0, 2.0)
    assert 'profile = "links.json"' in (tmp_path / "made/cluster.toml").read_text()


@pytest.mark.parametrize(
    ("links", "gpu", "wanted"), [("NV18", "h100-sxm", 450.0), ("NV18", "b200-sxm", 900.0), ("NV8", "h800-sxm", 200.0)]
)
def test_a_switch_gives_every_pair_all_links(cli: Any, tmp_path: Path, links: str, gpu: str, wanted: float) -> None:
    (tmp_path / "topo").write_text(topo(links, gpus=8, nics=8))
    found = cli("cluster", "--gpu", gpu, "--nodes", "1", "--topo", str(tmp_path / "topo")).json
    assert found["hardware"]["nvlink_GBps"] == wanted and "nvlink_pair_GBps" not in found["hardware"]


@pytest.mark.parametrize("links", ["PIX", "SYS", "NV4 and others"])
def test_without_a_switch_nothing_reduces_on_the_way(cli: Any, tmp_path: Path, links: str) -> None:
    """NVLink SHARP is NVSwitch's; the preset of an H100 has one."""
    text = topo(links.partition(" ")[0])
    (tmp_path / "topo").write_text(text.replace("NV4", "SYS", 1))
    found = cli("cluster", "--gpu", "h100-sxm", "--nodes", "1", "--topo", str(tmp_path / "topo")).json
    assert found["hardware"]["nvlink_sharp_efficiency"] == 0.0


def test_uplinks_that_nothing_can_fill_are_told(cli: Any, tmp_path: Path) -> None:
    """What is oversubscribed are leaves: how many nodes are under one has to be said."""
    flags = ["cluster", "--gpu", "h100-sxm", "--nodes", "4", "--oversubscription"]
    assert [e["what"] for e in cli(*flags, "2").json["unknown"]] == ["leaf_nodes"]
    assert not cli(*flags, "1").json["unknown"]


def test_what_is_not_understood_is_said_or_refused(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "mixed").write_text(topo("NV4").replace("NV4", "SYS", 1))
    found = cli("cluster", "--gpu", "a100-sxm-80gb", "--nodes", "1", "--topo", str(tmp_path / "mixed")).json
    assert [e["what"] for e in found["unknown"]] == ["nvlink_GBps"] and "nvlink_GBps" not in found["hardware"]
    (tmp_path / "short").write_text(topo("NV4").replace("\tNODE\tNODE\tNODE", "", 1))
    for flag, name in (("--topo", "short"), ("--ibstat", "short")):
        done = cli("cluster", "--gpu", "h100-sxm", "--nodes", "1", flag, str(tmp_path / name))
        assert done.code == 2 and done.error["file"] == str(tmp_path / name)

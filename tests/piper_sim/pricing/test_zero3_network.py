"""What a framework's ZeRO-3 makes of the network: gathers on demand, at a share of its rate."""

from pathlib import Path

import msgspec
import pytest

from piper_sim import load_job, predict


def exposed(tmp_path: Path, nodes: int = 4, zero: int = 3, **constants: object) -> float:
    """Seconds of data parallelism that nothing hides."""
    file = tmp_path / "soft.json"
    file.write_bytes(msgspec.json.encode({"name": "soft", **constants, "sources": dict.fromkeys(constants, "?")}))
    table = {
        "model": {"config": "llama3-8b", "num_hidden_layers": 8, "seq_len": 4096},
        "cluster": {"gpu": "h100-sxm", "nodes": nodes},
        "parallel": {"zero": zero},
        "schedule": {"microbatches": 2, "microbatch_size": 2},
        "costs": {"software": str(file), "interference": "none"},
    }
    return float(predict(load_job(table)).to_dict()["time_breakdown"]["0"]["exposed_dp"])


def test_weights_gathered_on_demand_are_waited_for(tmp_path: Path) -> None:
    ahead, late = exposed(tmp_path), exposed(tmp_path, gather_on_demand=True)
    assert late > ahead + 0.05


@pytest.mark.parametrize(("nodes", "zero", "slower"), [(4, 3, True), (1, 3, False), (4, 1, False)])
def test_a_share_of_the_network_is_what_gathers_between_nodes_get_and_no_other_message(
    tmp_path: Path, nodes: int, zero: int, slower: bool
) -> None:
    whole, part = (exposed(tmp_path, nodes, zero, gather_on_demand=True, zero3_network=x) for x in (1.0, 0.1))
    assert (part > 5 * whole) if slower else part == whole

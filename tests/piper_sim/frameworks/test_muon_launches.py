"""Megatron's Muon, in and out: its own way where nothing is said, and the same launch again."""

from pathlib import Path
from typing import Any

import pytest

from ir.core.errors import PiperError
from ir.job.build import prepare
from ir.job.load import job_from
from piper_sim.frameworks.exporting import export_launch
from piper_sim.frameworks.importing import ASSUMED
from tests.piper_sim.frameworks.test_export import prepared, read_back
from tests.piper_sim.frameworks.test_import import imported
from tests.piper_sim.frameworks.test_megatron_starts import MEGATRON

# NVIDIA/Megatron-LM OptimizerConfig: muon_momentum 0.95, muon_nesterov False, spectral, 5 steps, blockwise
USUAL = {"momentum": 0.95, "nesterov": False, "ns_steps": 5, "tp_mode": "blockwise", "adjust_lr": "match_rms_adamw"}
OWN = "--muon-momentum 0.9 --muon-use-nesterov --muon-num-ns-steps 6 --muon-tp-mode distributed "
LAUNCHES: dict[str, tuple[dict[str, Any], int]] = {
    "--optimizer muon ": (USUAL, 0),
    "--optimizer muon --use-distributed-optimizer ": (USUAL, 1),
    "--optimizer dist_muon ": (USUAL, 1),
    f"--optimizer dist_muon {OWN}--muon-scale-mode shape_scaling ": (
        {"momentum": 0.9, "nesterov": True, "ns_steps": 6, "tp_mode": "distributed", "adjust_lr": "original"},
        1,
    ),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_launch_becomes_a_job_and_the_same_launch_again(launch: str, tmp_path: Path) -> None:
    wanted, zero = LAUNCHES[launch]
    found = imported(tmp_path, MEGATRON + launch)
    assert {k: found.job["optimizer"][k] for k in wanted} == wanted
    assert (found.job["optimizer"]["name"], found.job["parallel"]["zero"]) == ("muon", zero)
    once = read_back(export_launch(prepare(job_from(found.job)), "megatron"))
    assert {**once.job["optimizer"], "lr": 0} == {**found.job["optimizer"], "lr": 0}
    assert once.job["parallel"] == found.job["parallel"]
    assert read_back(export_launch(prepare(job_from(once.job)), "megatron")).job == once.job


@pytest.mark.parametrize(
    "argument",
    [
        "--muon-scale-mode unit_rms_norm",
        "--muon-extra-scale-factor 0.5",
        "--muon-fp32-matmul-prec high",
        "--no-use-layer-wise-param-layout",
    ],
)
def test_what_is_predicted_otherwise_is_said(argument: str, tmp_path: Path) -> None:
    found = imported(tmp_path, MEGATRON + "--optimizer muon " + argument)
    assert argument.split()[0] in {e.argument.name for e in found.entries if e.list == ASSUMED}
    same = "--muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec medium"
    usual = imported(tmp_path, f"{MEGATRON}--optimizer muon {same}")
    assert not [e for e in usual.entries if e.list == ASSUMED and "muon" in e.argument.name]


def test_adam_has_no_words_of_muon() -> None:
    assert "muon" not in export_launch(prepared(), "megatron").files["launch.sh"]


@pytest.mark.parametrize("framework", ["deepspeed", "torchtitan", "accelerate"])
def test_others_have_no_words_for_it(framework: str) -> None:
    with pytest.raises(PiperError, match=f"{framework} cannot say optimizer.name = 'muon'"):
        export_launch(prepared(optimizer={"name": "muon"}), framework)

"""A layer of DeepSeek-V3's graph, priced beside 20 busy SMs, against the phases of DeepSeek's published profile."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from cost_models import work_seconds
from ir.core.ops import Pass
from ir.job.load import job_from
from piper_sim.pricing.prepare import hardware_of, prepare_priced

MEASURED = json.loads((Path(__file__).parents[2] / "data" / "published_costs.json").read_text())
PHASES = {  # of the profile -> (pass, parts) of the graph
    "attention_forward": [(Pass.F, ("attn", "router"))],
    "experts_forward": [(Pass.F, ("experts", "shared"))],
    "experts_input_grad": [(Pass.I, ("experts", "shared")), (Pass.R, ("shared",))],
    "experts_weight_grad": [(Pass.W, ("experts", "shared"))],
    "attention_input_grad": [(Pass.I, ("attn", "router", "add")), (Pass.R, ("attn", "router"))],
    "attention_weight_grad": [(Pass.W, ("attn", "router"))],
}


def layer_ms(gpu="h800-sxm", **precision):
    table = {
        "model": {"config": "deepseek-v3", "seq_len": 4096, "num_hidden_layers": 6},
        "cluster": {"gpu": gpu},
        "parallel": {"ep": 64, "dp": 64},
        "schedule": {"microbatches": 1, "recompute": ["norm", "up_projection", "activation"]},
        "precision": {"compute": "fp8", "dispatch": "fp8", "combine": "bf16", **precision},
    }
    job = job_from(table)
    hw = hardware_of(job)
    found = defaultdict(float)
    for n in prepare_priced(job, hw).graph().nodes:
        if n.part.startswith("l4."):
            found[n.kind, n.part.removeprefix("l4.")] += 1e3 * work_seconds(n.work, hw, 112)
    return {k: sum(found[p, x] for p, xs in v for x in xs) for k, v in PHASES.items()}


def test_every_phase_and_their_sum():
    modelled, measured = layer_ms(), MEASURED["deepseek_phases_ms"]["rows"]
    for phase, ms in measured.items():
        # Some casts for weight gradients run in W there and in I here.
        assert -0.2 < modelled[phase] / ms - 1 < 0.1, phase
    assert sum(modelled.values()) == pytest.approx(sum(measured.values()), rel=0.08)


@pytest.mark.parametrize(
    "cluster", [{"cast_efficiency": 1.0, "gemm": {"weight_grad": {"fp8": 1.0}}}, {"fp8_recipe": "tensor"}]
)
def test_without_its_fp8_costs_a_layer_is_too_quick(cluster, monkeypatch):
    """Negative control: products and casts as quick as those of plain formats, or another recipe's, miss the sum."""
    from cost_models.hardware import load_hardware

    hw = load_hardware("h800-sxm", cluster).in_training()
    monkeypatch.setattr("tests.piper_sim.pricing.test_published_layer.hardware_of", lambda _: hw)
    assert sum(layer_ms().values()) < 0.92 * sum(MEASURED["deepseek_phases_ms"]["rows"].values())

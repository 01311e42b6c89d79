"""The reference modules against Hugging Face transformers, where that is installed: same names, logits and gradients.

Not among our dependencies, so most machines skip this. With transformers 5.23.0 and torch 2.13.0 losses agreed to
2e-8 and gradients to 2e-6 of a tensor's largest (its rotary tables and softmaxes are float32); GPT-2, without either,
to 2e-15.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from executor.modules.base import evaluate
from executor.modules.decoder import Decoder
from ir.workload.config.keys import aliases
from tests.executor.families import TINY, tiny

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = [n for n in TINY if n != "mpt"]


def _config(family: str) -> Any:
    """The preset with its overrides, in the words of transformers 5."""
    preset, inline = TINY[family]
    raw = json.loads((files("ir.workload.config") / "presets" / f"{preset}.json").read_text())
    other = aliases(raw["model_type"])
    raw = {other.get(k, k): v for k, v in {**raw, **inline}.items()}
    kind, theta = raw.pop("model_type"), raw.pop("rope_theta", None)
    share = raw.pop("partial_rotary_factor", None)
    raw.pop("num_nextn_predict_layers", None)
    if theta:
        rope = {"rope_type": "default", "rope_theta": theta}
        raw["rope_parameters"] = rope | ({"partial_rotary_factor": share} if share else {})
    if kind.startswith("deepseek"):
        raw |= {
            "num_local_experts": raw["n_routed_experts"],
            "topk_group": raw.get("topk_group") or raw.get("n_group", 1),
        }
    return transformers.AutoConfig.for_model(kind, **raw, attn_implementation="eager", experts_implementation="eager")


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_hugging_faces(family: str) -> None:
    torch.manual_seed(0)
    no_mtp = {"num_nextn_predict_layers": 0} if family == "deepseek_v3" else {}
    config = tiny(family, **no_mtp)
    theirs = transformers.AutoModelForCausalLM.from_config(_config(family)).double().eval()
    model = Decoder(config, dtype=torch.float64)
    built = model.build(model.chunks)
    with torch.no_grad():
        for p in built.params.values():
            p += 0.15 * torch.randn_like(p)
    values = {n: p.detach() for n, p in built.params.items()}
    missing, unexpected = theirs.load_state_dict(values, strict=False)
    tied = {"lm_head.weight"} if config.tied else set()
    assert not unexpected and not {n for n in missing if not n.endswith("e_score_correction_bias")} - tied
    ids, labels = torch.randint(0, 64, (2, 2, 8))
    batch = {"labels": labels, "scale": 1.0}
    mine = evaluate(built, ids, {u: tuple(batch[w] for w in wants) for u, wants in built.extras.items()})
    want = F.cross_entropy(theirs(input_ids=ids).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(mine, want, rtol=1e-6, atol=0.0)
    mine.backward()
    want.backward()
    grads = dict(theirs.named_parameters())
    for name, p in built.params.items():
        assert p.grad is not None
        found, wanted = p.grad, grads[name].grad
        assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max()), name

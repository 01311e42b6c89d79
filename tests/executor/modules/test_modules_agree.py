"""The model graph's numbers against the reference modules', preset by preset: FLOPs and bytes of every part and pass.

True widths, few layers, no values. What must agree is compared exactly; where torch and the graph do differ, `BEYOND`
says by how much and why, and the difference itself is compared exactly.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from executor.frontend.aten import ATTENTION
from executor.frontend.measure import PartMeasure, survey, without_values
from executor.modules import layers
from executor.modules.decoder import DecoderModel
from executor.modules.functions import F
from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass
from ir.core.work import KernelKind, Work
from ir.workload.chunks import chunks
from ir.workload.config.load import ModelConfig, load_config, presets
from ir.workload.part import Chunk, Part, PartLayout, PartWork
from ir.workload.setting import MicrobatchShape, ModelPrecision
from ir.workload.work import part_work
from tests.executor.modules.hub import built
from tests.executor.modules.kept_beyond_graph import BEYOND, Case, kind

DRY = {"gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}}


def _flops(work: Work, *, attention: bool) -> int:
    return sum(k.flops * k.count for k in work if (k.kind is KernelKind.ATTENTION) == attention)


def disagreements(case: Case, m: PartMeasure, w: PartWork, part: Part) -> list[str]:
    """What differs between a module and the graph, beyond what the table allows."""
    beyond = [b for b in BEYOND if b.applies(case)]
    kept = dict.fromkeys(("I", "W"), 0)
    for size, until in zip(m.outs, m.keeps_outs, strict=True):
        kept[until or "I"] += size if until else 0
    pairs = {
        "saved until I": (sum(m.until_i) + kept["I"], _saved(w, True) + sum(b.until_i(case) for b in beyond)),
        "saved until W": (sum(m.until_w) + kept["W"], _saved(w, False) + sum(b.until_w(case) for b in beyond)),
        "stash": (sum(m.stash), w.stash_bytes + sum(b.stash(case) for b in beyond)),
        "output": (sum(m.outs), w.out_bytes + sum(b.out(case) for b in beyond)),
        "inputs read again": (
            tuple(k for k in m.keeps if k and not case.name.endswith(".embed") and not kind("shared")(case)),
            tuple(str(k.until) for k in part.keeps),
        ),
    }
    named = (("F", m.forward, w.forward), ("I", m.input_grad, w.input_grad), ("W", m.weight_grad, w.weight_grad))
    for name, mine, theirs in named:
        if case.config.qk_dim != case.config.v_dim and part.name == "attn":  # see `test_latent_attention…`
            wanted = _flops(theirs, attention=False) + 2 * _flops(theirs, attention=True)
            pairs[f"{name} FLOPs"] = (_flops(mine.work, attention=False), wanted)
        else:
            pairs[f"{name} products"] = (_flops(mine.work, attention=False), _flops(theirs, attention=False))
            pairs[f"{name} attention"] = (_flops(mine.work, attention=True), _flops(theirs, attention=True))
    return [f"{case.name} {what}: module {a}, graph {b}" for what, (a, b) in pairs.items() if a != b]


def _saved(w: PartWork, until_i: bool) -> int:
    return sum(s.bytes for s in w.saved if (s.until is Pass.I) == until_i)


@cache
def _config(preset: str) -> ModelConfig:
    """True widths; the first dense layer and the first with experts."""
    whole = load_config(preset)
    dense = len(whole.moe.dense_layers) if whole.moe else 0
    return load_config(preset, {"num_hidden_layers": dense + 1, **DRY.get(whole.model_type, {})})


def _chunks(config: ModelConfig) -> list[Chunk]:
    """One of each kind."""
    seen: dict[tuple[str, ...], Chunk] = {}
    for chunk in chunks(config):
        seen.setdefault((chunk.name.rstrip("0123456789"), *(p.name for p in chunk.parts)), chunk)
    return list(seen.values())


def compare(config: ModelConfig, size: int, length: int, attention: str = "flash") -> list[str]:
    """All disagreements of a config, on microbatches without values."""
    out = []
    with without_values():
        model = DecoderModel(config, dtype=torch.bfloat16, parts=True, attention=attention)
        for chunk in _chunks(config):
            stream = {u: (((size, length, config.hidden), torch.bfloat16),) for u in _outside(model, chunk.name)}
            found = survey(model, size, length, chunks=[chunk.name], given=stream)
            for part in chunk.parts:
                case = Case(config, f"{chunk.name}.{part.name}", size, length)
                shape = MicrobatchShape(size, length)
                work = part_work(config, chunk, part, PartLayout(), shape, ModelPrecision(), attention)
                out += disagreements(case, found[case.name], work, part)
    return out


def _outside(model: DecoderModel, chunk: str) -> list[str]:
    built = model.build([chunk])
    return [r for reads in built.reads.values() for r in reads if r and r not in built.units]


SAME_KIND = {"deepseek-v2", "kimi-k2", "qwen3-235b-a22b", "mixtral-8x22b", "llama2-7b", "llama2-13b", "llama2-70b"}
SAME_KIND |= {"qwen2.5-7b", *(p for p in built() if p.startswith("mpt") and p != "mpt-7b")}
ALL = [pytest.param(p, marks=pytest.mark.slow if p in SAME_KIND else ()) for p in built()]


@pytest.mark.parametrize("preset", ALL)
def test_presets_agree_at_their_true_widths(preset: str) -> None:
    config = _config(preset)
    length = max(8, config.moe.experts // 4) if config.moe else 64  # experts get equal shares
    assert compare(config, 2, length) == []


@pytest.mark.parametrize("preset", ["llama3-8b", "gpt2", "deepseek-v2-lite", "nemotron-15b"])
def test_unfused_attention_agrees(preset: str) -> None:
    config = _config(preset)
    assert compare(config, 1, config.moe.experts if config.moe else 64, "unfused") == []


@pytest.mark.parametrize("preset", sorted({*presets()} - {*built()}))
def test_other_presets_are_refused_by_name(preset: str) -> None:
    config = load_config(preset)
    with pytest.raises(PiperError, match=f"{config.model_type} is predicted, but has no reference module") as e:
        DecoderModel(config)
    assert (e.value.kind, e.value.key) == (ErrorKind.MODEL, "model_type")


@pytest.mark.parametrize("preset", built())
def test_presets_have_the_graphs_parameters(preset: str) -> None:
    whole = load_config(preset)
    config = load_config(preset, DRY.get(whole.model_type, {}))
    graph = {p.name: p.shape for c in chunks(config) for part in c.parts for p in part.params}
    assert DecoderModel(config).shapes == graph and list(DecoderModel(config).shapes) == list(graph)


def test_a_window_is_computed_whole_on_a_cpu_and_skipped_in_the_graph() -> None:
    config = load_config("mistral-7b", {"num_hidden_layers": 1, "sliding_window": 16})
    bad = compare(config, 1, 64)
    assert [b.split(":")[0] for b in bad] == ["l0.attn F attention", "l0.attn I attention"]


def test_torchs_own_counter_finds_the_same_flops() -> None:
    config = _config("qwen3-30b-a3b")
    with without_values():
        model = DecoderModel(config, dtype=torch.bfloat16)
        built = model.build(["l0"])
        x = torch.randn(1, 128, config.hidden, dtype=torch.bfloat16, requires_grad=True)
        custom = {op: _formula(op) for op in ATTENTION}
        with FlopCounterMode(display=False, custom_mapping=custom) as counter:
            built.units["l0"](x).sum().backward()
    layer, total = chunks(config)[1], 0
    for part in layer.parts:
        w = part_work(config, layer, part, PartLayout(), MicrobatchShape(1, 128), ModelPrecision())
        total += sum(k.flops * k.count for k in (*w.forward, *w.input_grad, *w.weight_grad))
    assert counter.get_total_flops() == total


def _formula(op: object) -> Callable[..., int]:
    """Shapes, as torch's counter wants them: 4·b·h·n²·d forward, 10·b·h·n²·d backward, half of it under the mask."""
    back = "backward" in str(op)

    def count(*shapes: object, out_shape: object = None, **_: object) -> int:
        b, h, n, d = shapes[1 if back else 0]  # type: ignore[misc]
        return int((5 if back else 2) * b * h * n * n * d)

    return count


# -- negative controls ------------------------------------------------------------------------------------------------


def _one(preset: str = "llama3-8b") -> tuple[Case, PartMeasure, PartWork, Part]:
    config = _config(preset)
    chunk = next(c for c in chunks(config) if c.name == "l0")
    part = next(p for p in chunk.parts if p.name == "mlp")
    with without_values():
        model = DecoderModel(config, dtype=torch.bfloat16, parts=True)
        stream = {"embed.embed": (((1, 64, config.hidden), torch.bfloat16),)}
        found = survey(model, 1, 64, chunks=["l0"], given=stream)["l0.mlp"]
    work = part_work(config, chunk, part, PartLayout(), MicrobatchShape(1, 64), ModelPrecision())
    return Case(config, "l0.mlp", 1, 64), found, work, part


def test_wrong_numbers_would_be_seen() -> None:
    case, found, work, part = _one()
    assert disagreements(case, found, work, part) == []
    doubled = tuple(replace(k, flops=2 * k.flops) for k in work.input_grad)
    for wrong, word in (
        (replace(work, input_grad=doubled), "I products"),
        (replace(work, weight_grad=work.weight_grad[:1]), "W products"),
        (replace(work, saved=work.saved[1:]), "saved until W"),
        (replace(work, saved=(replace(work.saved[0], until=Pass.I), *work.saved[1:])), "saved until I"),
        (replace(work, stash_bytes=work.stash_bytes + 2), "stash"),
        (replace(work, out_bytes=work.out_bytes // 2), "output"),
    ):
        assert any(word in d for d in disagreements(case, found, wrong, part)), word
    assert any("read again" in d for d in disagreements(case, found, work, replace(part, keeps=())))


def test_a_module_that_keeps_more_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "swiglu", lambda gate, up: F.silu(gate) * up)
    case, found, work, part = _one()
    extra = 2 * 64 * case.config.ffn
    wanted = sum(s.bytes for s in work.saved if s.until is Pass.I)
    assert disagreements(case, found, work, part) == [f"l0.mlp saved until I: module {wanted + extra}, graph {wanted}"]


def test_a_missing_bias_or_a_wrong_shape_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config("qwen2-7b")
    graph = {p.name: p.shape for c in chunks(config) for part in c.parts for p in part.params}
    assert DecoderModel(config).shapes == graph
    assert DecoderModel(replace(config, qkv_bias=False)).shapes != graph
    assert DecoderModel(replace(config, ffn=config.ffn + 1)).shapes != graph

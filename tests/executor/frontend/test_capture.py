"""`capture` and `model.json`: the same plan and FLOPs as the config's graph, read strictly, simulated without torch."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cost_models.compute.roofline import aligned
from executor.frontend import capture
from executor.frontend.measure import without_values
from executor.modules.decoder import DecoderModel
from ir.core.errors import PiperError
from ir.core.ops import Pass
from ir.core.work import DType, KernelKind
from ir.graph.graph import GraphNode
from ir.job import load_job
from ir.job.build import PreparedJob, prepare
from ir.plan.text import plan_digest
from ir.verify import check_plan
from ir.workload import load_config
from ir.workload.captured import load_captured
from tests.executor.frontend.models import hub_classes, small_net
from tests.executor.modules.hub import quiet

JOB = """
[model]
{model}
seq_len = {length}
[cluster]
gpu = "h100-sxm"
[parallel]
pp = 2
dp = 2
[schedule]
name = "1f1b"
microbatches = 4
"""
NET = str(Path(small_net.__file__))


@cache
def _described(preset: str, layers: int, length: int, **more: int) -> str:
    config = load_config(preset, {"num_hidden_layers": layers, **more})
    with without_values():
        model = DecoderModel(config, dtype=torch.bfloat16)
        return capture.text(capture.describe(model, preset, length, 1, DType.BF16))


def _both(folder: Path, preset: str, layers: int, length: int, *sets: str) -> tuple[PreparedJob, PreparedJob]:
    """A job of the config's graph, and the same of the reference module captured."""
    (folder / "model.json").write_text(_described(preset, layers, length))
    jobs = []
    for name, model in (
        ("config", f'config = "{preset}"\nnum_hidden_layers = {layers}'),
        ("graph", 'graph = "model.json"'),
    ):
        path = folder / f"{name}.toml"
        path.write_text(JOB.format(model=model, length=length))
        jobs.append(prepare(load_job(str(path), sets)))
    return jobs[0], jobs[1]


def _flops(nodes: tuple[GraphNode, ...], kind: Pass) -> int:
    return sum(k.flops * k.count for n in nodes if n.kind is kind for k in n.work)


def _op(text: str) -> str:
    """`1B0/head.head..l2.attn` → `1B0`: parts are named differently, and a captured layer has one."""
    return text.split("/")[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "zbv", "dualpipe", "interleaved-1f1b"])
def test_a_captured_reference_module_makes_the_plan_of_its_config(schedule: str, tmp_path: Path) -> None:
    # Two layers a stage: where a stage is one part, B falls apart into I, its send, and W.
    config, captured = _both(tmp_path, "tiny-llama", 8, 64, f"schedule.name={schedule}", "parallel.layers=even")
    a, b = config.plan(), captured.plan()
    assert [_op(a.text(i)) for i in range(len(a))] == [_op(b.text(i)) for i in range(len(b))]
    assert a.bounds.tolist() == b.bounds.tolist()
    check_plan(b)
    for kind in (Pass.F, Pass.I, Pass.W):
        assert _flops(a.graph.nodes, kind) == _flops(b.graph.nodes, kind) > 0
    params = [{p.name: p.shape for e in x.base.entries for p in e.part.params} for x in (config, captured)]
    assert params[0] == params[1] and list(params[0]) == list(params[1])
    assert [n.numel for n in a.graph.nodes if n.numel] == [n.numel for n in b.graph.nodes if n.numel]


def test_what_is_kept_between_passes_is_the_config_graphs_within_a_percent(tmp_path: Path) -> None:
    """At true widths. Captured layers keep rotary tables of their own, and small int64s; see test_modules_agree."""
    config, captured = _both(tmp_path, "llama3-8b", 2, 2048)
    kept = [sum(b.bytes for n in p.base.nodes for b in n.writes if _stays(n, b.slot)) for p in (config, captured)]
    assert kept[1] == pytest.approx(kept[0], rel=0.01)


def _stays(node: GraphNode, slot: str) -> bool:
    """Whether a buffer lives until backward inside its chunk: an attention's output is read again by the MLP's norm."""
    return slot in ("act", "tmp", "stash") or (slot == "out" and node.part.endswith((".attn", ".norm")))


@pytest.mark.parametrize("words", [50257, 50304])
def test_rows_of_products_are_as_long_as_there_are_features_not_tokens(words: int, tmp_path: Path) -> None:
    """Whether they begin at 16 bytes: 50,257 words in bf16 do not; 820 tokens would not, but are no row."""
    (tmp_path / "model.json").write_text(_described("llama3-8b", 1, 820, vocab_size=words))
    path = tmp_path / "graph.toml"
    path.write_text(JOB.format(model='graph = "model.json"', length=820))
    nodes = prepare(load_job(str(path), ("parallel.pp=1",))).base.nodes
    for kind in (Pass.F, Pass.I, Pass.W):
        products = [(n.part, k) for n in nodes if n.kind is kind for k in n.work if k.kind is KernelKind.GEMM]
        assert {("head" in part, aligned(k)) for part, k in products} == {(True, words == 50304), (False, True)}


@pytest.mark.parametrize(
    "sets",
    [
        ("parallel.zero=0",),
        ("parallel.zero=2",),
        ("parallel.zero=3",),
        ("schedule.recompute=full",),
        ("parallel.dp=4", "schedule.name=zbv"),
        ("parallel.pp=4", "schedule.name=dualpipev", "schedule.microbatches=8", "parallel.layers=[0,1,0,1,0,1,1,0]"),
    ],
    ids=lambda s: " ".join(x.partition("=")[2] for x in s),
)
def test_captured_graphs_go_through_every_division_there_is(sets: tuple[str, ...], tmp_path: Path) -> None:
    config, captured = _both(tmp_path, "tiny-llama", 4, 64, *sets)
    plan = captured.plan()
    check_plan(plan)
    assert plan_digest(plan) == plan_digest(captured.lowered()) != plan_digest(config.plan())


def test_the_command_writes_the_same_bytes_again_and_no_torch_is_needed_to_read_them(tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    given = [f"{NET}:build", "--out", str(out), "--seq-len", "16", "--microbatch-size", "2"]
    assert capture.main(given) == 0
    first = out.read_bytes()
    assert capture.main(given) == 2 and capture.main([*given, "--force"]) == 0 and out.read_bytes() == first
    found = load_captured(out)
    assert found == load_captured(out) and hash(found) == hash(load_captured(out))
    assert [c.name for c in found.chunks] == ["embed", "l0", "l1", "l2", "head"] and found.config.layers == 3
    assert sum(p.numel for c in found.chunks for p in c.parts[0].params) == sum(
        p.numel() for p in small_net.build().parameters()
    )
    job = tmp_path / "job.toml"
    sizes = ("schedule.microbatch_size=2", "parallel.pp=3")
    job.write_text(JOB.format(model='graph = "model.json"', length=16))
    code = "import sys; sys.modules['torch'] = None\nfrom piper_sim.app.cli import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "simulate", str(job), "--json", *(x for s in sizes for x in ("--set", s))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["iteration_s"] > 0


def test_products_of_a_users_module_are_counted_by_hand(tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    capture.main([f"{NET}:build", "--out", str(out), "--seq-len", "16"])
    parts, w, t = load_captured(out).found.parts, small_net.WIDTH, 16
    forward = 2 * t * (w * w + 2 * w * 2 * w)
    block = parts["block"].passes
    for p in (block.F, block.I, block.W):
        assert sum(k.flops * k.count for k in p.kernels) == forward
    (mm,) = [k for k in parts["head"].passes.F.kernels if k.kind is KernelKind.GEMM]
    assert mm.shape == (t, small_net.VOCAB, w)
    assert parts["block"].output_bytes == 2 * t * w and parts["embed"].stash_bytes == 2 * t * w


def test_grouped_products_of_experts_are_counted_by_hand() -> None:
    """Of transformers' experts that no tag divides; torch itself counts no FLOPs of them."""
    tokens, top_k, h, width, experts = 16, 2, 32, 48, 4

    def build() -> nn.Module:
        sizes = {**hub_classes.SIZES, "hidden_size": h, "intermediate_size": width, "num_hidden_layers": 1}
        kind = {"num_local_experts": experts, "num_experts_per_tok": top_k, "_experts_implementation": "grouped_mm"}
        return hub_classes._made("MixtralForCausalLM", "MixtralConfig", {**sizes, **kind})

    with quiet():
        found = capture.capture(build(), batch=(1, tokens), tags={"PP": "model.layers.*"})
    passes = found["parts"]["block"]["passes"]
    rows = tokens * top_k
    for name, gated, back in (
        ("F", [experts, rows // experts, 2 * width, h], [experts, rows // experts, h, width]),
        ("I", [experts, rows // experts, h, 2 * width], [experts, rows // experts, width, h]),
        ("W", [experts, 2 * width, h, rows // experts], [experts, h, width, rows // experts]),
    ):
        grouped = [k for k in passes[name]["kernels"] if k["kind"] == "grouped_gemm"]
        assert sorted(k["shape"] for k in grouped) == sorted([gated, back]), name
        assert sum(k["flops"] for k in grouped) == 2 * rows * h * 3 * width, name


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        *inner, last = [int(k) if k.isdigit() else k for k in path.split("/")]
        at: Any = raw
        for k in inner:
            at = at[k]
        if value is None:
            del at[last]
        else:
            at[last] = value

    return change


BAD = {
    "an older version": (_set("version", 0), "version", "capture it again"),
    "another file": (_set("format", "llama"), "format", "piper-sim/model"),
    "an unknown key": (_set("sequence", 4), "sequence", "seq_len"),
    "a missing key": (_set("hidden", None), "hidden", "missing"),
    "FLOPs off by two": (
        _set("parts/l/passes/F/kernels/0/flops", 7),
        "parts.l.passes.F.kernels[0]",
        "twice their product",
    ),
    "a negative size": (_set("parts/l/stash_bytes", -1), "parts.l.stash_bytes", "out of range"),
    "a fraction": (_set("parts/l/stash_bytes", 1.5), "parts.l.stash_bytes", "integer"),
    "a flag": (_set("parts/l/stash_bytes", True), "parts.l.stash_bytes", "integer"),
    "an unknown kind": (_set("parts/l/passes/F/kernels/0/kind", "gem"), "parts.l.passes.F.kernels[0].kind", "gemm"),
    "an unknown format": (_set("dtype", "bf-16"), "dtype", "bf16"),
    "no such part": (_set("chunks/1/part", "m"), "chunks[1].part", "unknown"),
    "a wrong shape": (_set("chunks/1/parameters/0/1", [2, -3]), "chunks[1].parameters", "out of range"),
    "two shapes": (_set("chunks/2/parameters/0/0", "w0"), "chunks[2].parameters", "two shapes"),
    "trained and frozen": (_set("chunks/2/frozen", [["w0", [2, 3]]]), "chunks", "'w0' is trained, and frozen"),
    "layers out of order": (_set("chunks/2/name", "l5"), "chunks", "l0, l1"),
    "a missing pass": (_set("parts/l/passes/W", None), "parts.l.passes.W", "missing"),
}


def _small() -> dict[str, Any]:
    gemm = {"op": "mm", "kind": "gemm", "flops": 48, "bytes": 8, "dtype": "bf16", "shape": [2, 3, 4], "count": 1}
    part = {
        "output_bytes": 16,
        "reads_input_again": "W",
        "saved_bytes": {"until_I": 0, "until_W": 8, "constants": 0},
        "stash_bytes": 4,
        "passes": {n: {"workspace_bytes": 0, "kernels": [copy.copy(gemm)]} for n in "FIW"},
    }
    layers = [{"name": f"l{i}", "part": "l", "parameters": [[f"w{i}", [2, 3 + i]]]} for i in range(2)]
    return {
        "format": "piper-sim/model",
        "version": 1,
        "model": "m.py:build",
        "microbatch_size": 1,
        "seq_len": 2,
        "dtype": "bf16",
        "hidden": 4,
        "vocab": 8,
        "chunks": [{"name": "embed", "part": "e", "parameters": [["e", [8, 4]]]}, *layers],
        "parts": {"e": copy.deepcopy(part), "l": part},
    }


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, key, said = BAD[case]
    path, raw = tmp_path / "model.json", _small()
    path.write_text(json.dumps(raw))
    assert len(load_captured(path).chunks) == 3
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(PiperError) as caught:
        load_captured(path)
    assert caught.value.file == str(path) and (caught.value.key or "") in (key, "") and said in str(caught.value)


def test_numbers_that_are_none_and_keys_given_twice_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    for wrong in (
        json.dumps(_small()).replace('"hidden": 4', '"hidden": NaN'),
        '{"format": 1, "format": 1}',
        "[]",
        "{",
    ):
        path.write_text(wrong)
        with pytest.raises(PiperError, match=r"model\.json"):
            load_captured(path)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("parallel.tp=2", "parallel.tp"),
        ("parallel.cp=2", "parallel.cp"),
        ("parallel.ep=2", "parallel.ep"),
        ("model.seq_len=128", "model.seq_len"),
        ("schedule.microbatch_size=2", "schedule.microbatch_size"),
        ("precision.compute=fp32", "precision.compute"),
        ("precision.params=fp32", "precision.params"),
        ('schedule.recompute=["norm"]', "schedule.recompute"),
        ("schedule.recompute=mlp", "schedule.recompute"),
        ("model.config=tiny-llama", "model.config"),
        ("model.hidden_size=4", "model.hidden_size"),
    ],
)
def test_a_job_of_another_shape_than_captured_is_refused_by_its_key(setting: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(PiperError) as caught:
        _both(tmp_path, "tiny-llama", 4, 64)
        prepare(load_job(str(tmp_path / "graph.toml"), [setting]))
    assert caught.value.key == key and caught.value.file == str(tmp_path / "graph.toml") and caught.value.suggestion


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("parallel.etp=2", "etp = 1"),
        ("model.encoder_seq_len=4", "leave it out"),
        ('schedule.recompute=["norm"]', 'recompute = "full"'),
    ],
)
def test_what_no_capture_has_is_not_to_be_captured_again(setting: str, fix: str, tmp_path: Path) -> None:
    _both(tmp_path, "tiny-llama", 4, 64)
    with pytest.raises(PiperError) as caught:
        prepare(load_job(str(tmp_path / "graph.toml"), [setting]))
    assert caught.value.suggestion == fix


def test_shapes_that_depend_on_values_cannot_be_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(NET).read_text().replace("x = x + self.mix", "x = x[x[..., 0] > 0].sum() + x + self.mix")
    (tmp_path / "m.py").write_text(source)
    assert capture.main([f"{tmp_path}/m.py:build", "--out", str(tmp_path / "m.json"), "--seq-len", "8"]) == 2
    assert "shapes depend on values" in capsys.readouterr().err

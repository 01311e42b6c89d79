"""Profile files: what is written is read back, what is doubtful is refused with its key, and classes fit any plan."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.profile.file import digest_of, load_profile, parse_profile, profile_text
from cost_models.profile.fit import fit
from cost_models.profile.profile import CostSource, MeasuredCost, OpEntry, Profile, ProfileMachine, lookup, plan_keys
from cost_models.profile.shapes import KernelShape
from ir.core.errors import ErrorKind, PiperError
from ir.core.ops import Pass
from ir.graph.classes import node_classes
from ir.job.build import prepare
from ir.job.load import job_from
from ir.plan.plan import Plan

MACHINE = ProfileMachine("Xeon", 2, "", 0, {"python": "3.11.7", "torch": "2.13.0"}, "2026-01-01T00:00:00Z")
OPS = {
    "F/attn 3f2a9c12": OpEntry(MeasuredCost(0.031, 0.002, 40)),
    "W/attn 3f2a9c12": OpEntry(MeasuredCost(0.02, 0.001, 40)),
}
LINKS = {
    "p2p 4096": MeasuredCost(2e-4, 1e-5, 9),
    "p2p 262144": MeasuredCost(5e-4, 1e-5, 9),
    "all_reduce 2 1048576": MeasuredCost(4e-3, 1e-4, 9),
}
PROFILE = Profile.of(MACHINE, OPS, LINKS, host_s=2e-5)


def plan_of(*sets: str, name: str = "1f1b", pp: int = 2, mbs: int = 4, model: str = "tiny-llama") -> Plan:
    table = {
        "model": {"config": model, "seq_len": 64},
        "parallel": {"pp": pp},
        "schedule": {"name": name, "microbatches": mbs},
    }
    return prepare(job_from(table, sets)).plan()


# -- the file ---------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile_text(PROFILE))
    assert load_profile(path) == PROFILE
    assert profile_text(load_profile(path)) == profile_text(PROFILE)


def test_text_does_not_depend_on_the_order_of_measuring() -> None:
    turned = Profile.of(MACHINE, dict(reversed(OPS.items())), dict(reversed(LINKS.items())), 2e-5)
    assert profile_text(turned) == profile_text(PROFILE)


seconds = st.floats(1e-9, 1e3)
measured = st.builds(MeasuredCost, seconds, st.floats(0, 1e3), st.integers(1, 10**6))


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=("C", "Z")), min_size=1), st.builds(OpEntry, measured)),
    st.dictionaries(st.integers(0, 10**12).map(lambda n: f"p2p {n}"), measured, max_size=6),
    st.none() | seconds,
)
def test_any_profile_is_read_back(
    ops: dict[str, OpEntry], links: dict[str, MeasuredCost], host_s: float | None
) -> None:
    made = Profile.of(MACHINE, ops, links, host_s)
    assert parse_profile(profile_text(made)) == made


Change = Callable[[dict[str, Any]], object]
REFUSED: dict[str, tuple[Change, str, str]] = {
    "unknown at the top": (lambda t: t.update(op={}), "op", "ops"),
    "missing": (lambda t: t.pop("links"), "links", "table"),
    "another version": (lambda t: t.update(profile_version=1), "profile_version", "calibrate"),
    "a version that is no number": (lambda t: t.update(profile_version=True), "profile_version", "2"),
    "a typo in an op": (
        lambda t: t["ops"]["W/attn 3f2a9c12"].update(medain_s=1),
        "ops.W/attn 3f2a9c12.medain_s",
        "median_s",
    ),
    "half a time": (lambda t: t["ops"]["W/attn 3f2a9c12"].pop("count"), "ops.W/attn 3f2a9c12.count", "spread_s"),
    "an op that says nothing": (lambda t: t["ops"].update(x={}), "ops.x.median_s", "spread_s"),
    "a negative time": (lambda t: t["links"]["p2p 4096"].update(median_s=-1), "links.p2p 4096.median_s", "from 0 up"),
    "a boolean": (lambda t: t["links"]["p2p 4096"].update(count=True), "links.p2p 4096.count", "integer"),
    "no samples": (lambda t: t["links"]["p2p 4096"].update(count=0), "links.p2p 4096.count", "from 1 up"),
    "too large": (lambda t: t.update(host_s=10**400), "host_s", "numbers up to 1e+18"),
    "a link without bytes": (lambda t: t["links"].update({"p2p": t["links"]["p2p 4096"]}), "links.p2p", "<bytes>"),
    "a link of no shape": (
        lambda t: t["links"].update({"p2p@ 64": t["links"]["p2p 4096"]}),
        "links.p2p@ 64",
        "@<nodes>",
    ),
    "half a shape": (
        lambda t: t["ops"]["W/attn 3f2a9c12"].update(family="W"),
        "ops.W/attn 3f2a9c12.at",
        "family",
    ),
    "a flag that is off": (
        lambda t: t["ops"]["W/attn 3f2a9c12"].update(alone=False),
        "ops.W/attn 3f2a9c12.alone",
        "true",
    ),
    "pieces out of order": (
        lambda t: t["curves"]["p2p"]["pieces"].insert(
            0, {**t["curves"]["p2p"]["pieces"][0], "first": 10**7, "last": 10**7}
        ),
        "curves.p2p.pieces",
        "order",
    ),
    "a pair of what there is not": (
        lambda t: t["pairs"].update({"gemm p2p": {"held": 0, "moving": 0, "wire": 0}}),
        "pairs.gemm p2p",
        "memory p2p",
    ),
    "a changed time": (
        lambda t: t["ops"]["W/attn 3f2a9c12"].update(median_s=0.019),
        "digest",
        "null",
    ),
    "a changed machine": (lambda t: t["machine"].update(cpu="a faster one"), "digest", "calibrate"),
    "an old list that is no text": (lambda t: t["ops"].update(x={"alloc": 4}), "ops.x.alloc", "text"),
    "a table that is none": (lambda t: t.update(ops=[]), "ops", "table"),
    "a changed fit error": (lambda t: t.update(fit_error=0.5), "fit_error", "curves"),
    "a machine without cores": (lambda t: t["machine"].update(cores=0), "machine.cores", "from 1 up"),
    "a version that is no text": (lambda t: t["machine"]["versions"].update(torch=2), "machine.versions.torch", "text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_doubtful_is_refused_with_its_key(name: str, tmp_path: Path) -> None:
    change, key, help_ = REFUSED[name]
    table = json.loads(profile_text(PROFILE))
    change(table)
    (tmp_path / "p.json").write_text(json.dumps(table))
    with pytest.raises(PiperError) as caught:
        load_profile(tmp_path / "p.json")
    error = caught.value
    assert error.file == str(tmp_path / "p.json") and error.key == key and error.kind is ErrorKind.JOB
    assert help_ in f"{error.allowed} {error.suggestion}"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"ops": {}, "ops": {}}', "NaN", "[" * 10**5])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(PiperError):
        parse_profile(text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PiperError, match="cannot read") as caught:
        load_profile(tmp_path / "none.json")
    assert caught.value.kind is ErrorKind.IO and "calibrate" in str(caught.value.suggestion)


# -- looking up -------------------------------------------------------------------------------------------------------


def test_a_message_of_another_size_is_read_off_the_curve() -> None:
    exact, between = lookup(PROFILE, "p2p 4096"), lookup(PROFILE, "p2p 65536")
    assert exact is not None and exact.source is CostSource.MEASURED and exact.seconds == 2e-4
    assert between is not None and between.source is CostSource.INTERPOLATED and 2e-4 < between.seconds < 5e-4
    beyond = lookup(PROFILE, "p2p 1048576")
    assert beyond is not None and beyond.source is CostSource.EXTRAPOLATED and beyond.seconds > 5e-4
    assert between.spread_s / between.seconds == pytest.approx(0.035), "of the two sizes behind the curve"
    worse = {"p2p": PROFILE.curves["p2p"], **{f"{x}": replace(PROFILE.curves["p2p"], error=x) for x in (0.9, 0.2)}}
    assert replace(PROFILE, curves=worse).fit_error == 0.9 and replace(PROFILE, curves={}).fit_error == 0.0
    assert lookup(PROFILE, "all_reduce 2 64") is None, "one size makes no curve"
    assert lookup(PROFILE, "p2p") is None and lookup(PROFILE, "F/attn 00000000") is None


@pytest.mark.parametrize("alone", [True, False])
def test_an_op_of_another_size_is_read_off_those_measured_like_it(alone: bool) -> None:
    known = {n: OpEntry(MeasuredCost(n / 1000, 0.0, 9), KernelShape("F", {"numel": n}), alone) for n in (1000, 4000)}
    found = lookup(
        Profile.of(MACHINE, {f"F {n}": e for n, e in known.items()}), "F 0", KernelShape("F", {"numel": 2000})
    )
    assert found is not None and found.seconds == pytest.approx(2.0)
    assert (found.source, found.alone) == (CostSource.INTERPOLATED, alone)


def test_a_profile_of_old_is_read_without_what_it_says_of_allocations() -> None:
    table = json.loads(profile_text(PROFILE))
    table["ops"]["F/attn 3f2a9c12"]["alloc"] = "+4 +4096 -x0 -F1 >F1"
    table["ops"]["UPDATE/tensor 11aa22bb"] = {"alloc": "-~ +8n -T0"}
    table["digest"] = digest_of(table)
    assert parse_profile(json.dumps(table)) == PROFILE


@given(st.floats(0, 1e-2), st.floats(0, 1e-6), st.lists(st.integers(1, 10**9), min_size=2, max_size=8, unique=True))
def test_a_fit_finds_the_line_it_was_given(alpha: float, beta: float, sizes: list[int]) -> None:
    points = [(n, alpha + beta * n) for n in sizes]
    if min(t for _, t in points) > 1e-9:
        assert fit(points).error < 1e-3


@given(st.lists(st.tuples(st.integers(1, 10**9), seconds), min_size=2, max_size=8))
def test_a_fit_is_never_negative(points: list[tuple[int, float]]) -> None:
    found = fit(points)
    assert all(p.alpha_s >= 0 and p.beta_s_per_byte >= 0 for p in found.pieces)
    assert (
        len({n for n, _ in points}) < len(points)
        or found.error >= abs(found.seconds(points[0][0]) / points[0][1] - 1) - 1e-6
    )


# -- a file that was changed ------------------------------------------------------------------------------------------


def test_a_file_changed_by_hand_is_read_where_it_says_so() -> None:
    table = json.loads(profile_text(PROFILE))
    table["ops"]["W/attn 3f2a9c12"]["median_s"] = 0.019
    with pytest.raises(PiperError, match="changed after it was measured"):
        parse_profile(json.dumps(table))
    table["digest"] = None
    edited = parse_profile(json.dumps(table))
    assert not edited.sealed and edited.ops["W/attn 3f2a9c12"].time == MeasuredCost(0.019, 0.001, 40)
    assert json.loads(profile_text(edited))["digest"] is None, "what was edited is not sealed again"


def test_the_digest_is_of_values_and_not_of_how_they_are_laid_out() -> None:
    assert parse_profile(json.dumps(json.loads(profile_text(PROFILE)))) == PROFILE


# -- classes ----------------------------------------------------------------------------------------------------------


def classes(plan: Plan) -> set[str]:
    """Of what happens once per microbatch."""
    g = plan.graph
    return {c for n, c in zip(g.nodes, node_classes(g), strict=True) if not n.once}


@pytest.mark.parametrize(("name", "pp", "mbs"), [("gpipe", 1, 3), ("zbv", 2, 5), ("dualpipe", 4, 6), ("1f1b", 3, 2)])
def test_a_profile_serves_every_plan_of_the_same_sizes(name: str, pp: int, mbs: int) -> None:
    here, there = plan_of(), plan_of(name=name, pp=pp, mbs=mbs)
    assert classes(here) == classes(there)
    assert {k.split()[0] for k in classes(here)} >= {"F/attn", "I/mlp", "W/head", "F/norm", "F/embed"}
    profile = Profile.of(MACHINE, {key: OpEntry(MeasuredCost(1.0, 0.1, 9)) for key in node_classes(here.graph)}, LINKS)
    missing = [key for key in plan_keys(there) if lookup(profile, key) is None]
    assert all(not key.startswith(("F", "I", "W", "p2p")) for key in missing)


def test_equal_layers_have_one_class_and_the_index_is_not_in_it() -> None:
    g = plan_of().graph
    forward = {c for n, c in zip(g.nodes, node_classes(g), strict=True) if (n.kind, n.part[-5:]) == (Pass.F, ".attn")}
    assert len(forward) == 1


@pytest.mark.parametrize(
    "change",
    [
        "model.seq_len=128",
        "model.hidden_size=128",
        "schedule.microbatch_size=2",
        "precision.compute=fp32",
        "precision.params=fp32",
        "schedule.recompute=full",
        "model.attention=unfused",
    ],
)
def test_other_sizes_have_other_classes(change: str) -> None:
    changed = {k for k in classes(plan_of(change)) if k.startswith(("F/attn", "I/attn", "W/attn"))}
    assert not changed & classes(plan_of())


def test_experts_and_multi_token_prediction_are_told_apart() -> None:
    found = {k.split()[0] for k in classes(plan_of(model="tiny-moe"))}
    assert {"F/router", "F/experts", "I/add"} <= found


def test_plan_keys_count_every_instance() -> None:
    keys = plan_keys(plan_of(mbs=5))
    attn = [count for key, count in keys.items() if key.startswith("F/attn")]
    transfers = [count for key, count in keys.items() if key.startswith("p2p")]
    layers = len({e.chunk.name for e in plan_of().graph.entries if e.part.name == "attn"})
    assert attn == [5 * layers] and sum(transfers) == 2 * 5


def test_the_fingerprint_is_of_the_machine_not_of_the_day() -> None:
    here = ProfileMachine.here()
    assert here.cores >= 1 and here.cpu and here.versions["python"]
    assert replace(here, date="another").fingerprint == here.fingerprint
    assert replace(here, cores=here.cores + 1).fingerprint != here.fingerprint

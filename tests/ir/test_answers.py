"""Plans of drawn jobs and works of families' parts are what they were.

No oracle knows all these numbers; tests beside the code hold those that one knows to it. Here nothing changes unseen: a
plan is a value, and who alters one, or what a part costs, writes `golden` anew and reads the difference.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from ir.core.errors import ErrorKind, PiperError
from ir.core.filters import parse_filter
from ir.core.work import DType
from ir.directives import ReplicateDirective
from ir.graph.classes import node_classes
from ir.graph.graph import Graph
from ir.graph.sync import buckets
from ir.job.build import prepare
from ir.job.load import job_from
from ir.lower import MessageQueue, PassMerge, PlanPolicy, lower
from ir.plan.text import parse_plan, plan_digest, plan_text
from ir.schedules.registry import NAMES
from ir.verify import check_plan
from ir.workload import config_from, model_chunks
from ir.workload.part import PartLayout
from ir.workload.setting import KernelStyle, MicrobatchShape, ModelPrecision, TokenLossKind, check_setting
from ir.workload.work import dispatch_bytes, part_work
from tests.ir.plans import FIXED, moe_graph
from tests.ir.verify.edits import differences
from tests.ir.workload.models import FAMILIES, small

JOBS, MIXES, CHANGES = 240, 120, 12
CAPTURED = str(Path(__file__).parents[1] / "fuzz" / "seeds" / "model.json")
LATE = ("gather_on_demand", "reduce_behind")
Golden = Callable[[str, str], None]
# Whatever a job may vary, the usual value first.
VARIED: Mapping[str, Mapping[str, Sequence[object]]] = {
    "parallel": {
        "tp": (1, 2), "cp": (1, 2), "pp": (2, 1, 4, 3), "dp": (2, 1, 4), "ep": (1, 2), "etp": (1, 2),
        "zero": (0, 1, 2, 3), "bucket_MiB": (None, 0.01, 0.05), "prefetch": (1, 0, 2),
        "overlap_grad_reduce": (True, False), "sequence_parallel": (True, False), "layers": ("balanced", "even"),
        "order": ("tp cp ep dp pp", "pp dp cp tp ep"),
    },
    "schedule": {
        "name": NAMES, "microbatches": (4, 1, 2, 6), "microbatch_size": (1, 2), "flushes": (1, 2),
        "recompute": ("none", "full", "selective", ["norm"], ["mlp"], ["up_projection", "activation"], ["operators"],
                      ["attention", "norm"]),
        "recompute_layers": (None, "1::2", 1, [0, 2]), "merge": ("alternate", "template"),
        "delay_wgrad": (False, True), "p2p": ("overlapped", "blocking", "ordered"),
    },
    "precision": {"compute": ("bf16", "fp8", "fp32")},
    "optimizer": {"clip_norm": (1.0, 0.0)},
}  # fmt: skip
STYLES = [
    KernelStyle(loss, eager, gathered, vectors)
    for (loss, eager), gathered, vectors in product(product(TokenLossKind, (False, True)), (False, True), (0, 3))
]


def digest(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()[:12]


def short(error: PiperError) -> str:
    """Its words, one line under the other; of long ones the beginning."""
    lines = str(error).replace(CAPTURED, "model.json").split("\n")
    return "\n  ".join(x if len(x) < 200 else f"{x[:160]} … {digest(x)}" for x in lines)


def totals(graph: Graph) -> str:
    """Sums that a reader may compare; beside the digests, which tell more and say nothing."""
    works = [k for n in graph.nodes for k in n.work]
    sent = [m.bytes for n in graph.nodes for m in (*n.inline, *((n.message,) if n.message else ()))]
    sizes = {
        "flops": sum(k.flops * k.count for k in works),
        "moved": sum(k.bytes * k.count for k in works),
        "sent": sum(sent),
        "written": sum(b.bytes for n in graph.nodes for b in n.writes),
        "parameters": sum(p.numel for e in graph.entries for p in e.part.params),
    }
    return " ".join(f"{k} {v}" for k, v in sizes.items())


def drawn(number: int) -> dict[str, dict[str, object]]:
    """A job of some family, small."""
    rng = random.Random(f"job {number}")
    other = {s: {k: rng.choice(v) for k, v in keys.items() if rng.random() < 0.4} for s, keys in VARIED.items()}
    kept = {s: {k: v for k, v in keys.items() if v is not None} for s, keys in other.items()}
    attention = rng.choice(("flash", "flash", "unfused"))
    family = [*FAMILIES][number % len(FAMILIES)] if number % 3 else "deepseek_v3"
    if number % 8:  # mistakes are drawn, too, but most jobs have none
        parallel, schedule = kept["parallel"], kept["schedule"]
        if config_from(small(family), "small").moe is None:
            kept["parallel"] = {k: v for k, v in parallel.items() if k not in ("ep", "etp")}
        if "recompute_layers" in schedule:
            schedule["recompute"] = [*VARIED["schedule"]["recompute"][1:]][number % 7]
    if number % 12 == 5:  # a module that was captured
        kept["precision"] = {"compute": rng.choice(("fp32", "fp32", "bf16")), **kept["precision"]}
        return {"model": {"graph": CAPTURED, "seq_len": 4, "attention": attention}, **kept}
    more = {"num_nextn_predict_layers": rng.randrange(2)} if family == "deepseek_v3" else {}
    return {"model": {**small(family), **more, "seq_len": 32, "attention": attention}, **kept}


def planned(number: int, **parallel: object) -> Iterable[str]:
    """A drawn job's plan, which obeys the rules and is what its text says; or why there is none."""
    table = drawn(number)
    table["parallel"] |= parallel
    said = " ".join(f"{k}={v}" for s, keys in table.items() if s != "model" for k, v in keys.items())
    yield f"{number} {table['model'].get('model_type', 'captured')} {table['model']['attention']} {said}"
    try:
        prepared = prepare(job_from(table))
        plan = prepared.plan()
        check_plan(plan)
    except PiperError as e:
        assert e.kind is not ErrorKind.ILLEGAL_PLAN, "a plan of ours that its rules refuse"
        yield f"  {short(e)}"
        return
    assert not differences(plan, parse_plan(plan_text(plan), plan.graph))
    graph = plan.graph
    classes = node_classes(graph)
    yield f"  ops {len(plan)} {totals(graph)}"
    yield f"  plan {plan_digest(plan)[:12]} graph {digest((graph.nodes, graph.edges))} classes {digest(classes)}"
    strategy = [str(d) for d in prepared.strategy]
    yield f"  layers {prepared.layers} strategy {digest((strategy, [d.json() for d in prepared.strategy]))}"


def mixed(number: int, copies: int = 1) -> str:
    """A plan of invented numbers, each different, whose layers and parts are kept in step in ways of their own."""
    rng = random.Random(f"mixed {number}")

    def times(zero: int) -> int:
        return rng.choice((1, copies)) if copies > 1 and zero else 1

    name, ranks, mbs = rng.choice(FIXED), rng.choice((1, 2, 2, 4)), rng.choice((1, 2, 3, 5))
    stages = 2 * ranks + rng.randrange(3)
    late: dict[str, Any] = {k: rng.random() < 0.2 for k in ("whole_backward", "delay_wgrad", "blocking", *LATE)}
    merge = rng.choice((PassMerge.ALTERNATE, PassMerge.TEMPLATE, PassMerge.FUSED))
    late |= {"lookahead": rng.choice((1, 1, 0, 2)), "clip": rng.random() < 0.7}
    policy = PlanPolicy(merge, p2p=rng.choice([*MessageQueue]), **late)
    some = [{"L": str(rng.randrange(4))}, {"L": str(rng.randrange(4))}, {"L": "1..2"}, {"EP": "*"}, {"PP": "0"}]
    filters = rng.sample(some, rng.randrange(4))
    then = tuple(
        ReplicateDirective(
            parse_filter(f), zero := rng.randrange(4), rng.choice((None, 0.0002, 0.0005)),
            *rng.choices(("dp", "zero"), k=2), times(zero)
        )
        for f in filters
    )  # fmt: skip
    given = dict(
        zero=rng.randrange(4), dp=(dp := rng.choice((2, 3, 4))), ep=1 if dp == 3 else rng.choice((1, 2)), layers=stages,
        tied=rng.random() < 0.3, recompute=rng.choice(((), ("full",), ("norm",), ("mlp", "norm"))),
        prefetch=rng.randrange(3), bucket_MiB=rng.choice((None, 0.0003)), reduce_stream=rng.choice(("dp", "zero")),
        then=then,
    )  # fmt: skip
    if copies > 1:
        given |= {"dp": 4, "dp_replicate": copies, "ep": min(4 // copies, int(str(given["ep"])))}
    said = f"{number} {name} P{ranks} M{mbs} {policy.header()} {given | {'then': [d.json() for d in then]}}"
    try:
        graph = moe_graph(name, ranks, mbs, **given)
    except PiperError as e:
        return f"{said}\n  {short(e)}"
    if apart := rng.random() < 0.2:  # some parts are kept in step by nothing
        graph = replace(graph, replicas={k: r for k, r in graph.replicas.items() if k % 3})
    try:
        plan = lower(graph, policy, {"schedule": name})
        check_plan(plan)
    except PiperError as e:  # some plans stop whose stages compute nothing beside a transfer
        known = e.kind in (ErrorKind.DEADLOCK, ErrorKind.DIRECTIVE) or "cannot be one fused op" in e.message
        assert apart or known, e
        return f"{said}\n  {short(e)}"
    found = digest([(b.key, b.numel, b.ranks, b.owners, b.params) for b in buckets(plan.graph)])
    return f"{said}\n  ops {len(plan)} plan {plan_digest(plan)[:12]} buckets {found} graph {digest(plan.graph.nodes)}"


def worked(family: str) -> Iterable[str]:
    """What a family's parts cost and keep, in a few settings."""
    config = config_from(small(family), "small")
    for number in range(4):
        rng = random.Random(f"work {family} {number}")
        tp, cp, ep, etp = (rng.choice((1, 2)) for _ in range(4))
        layout = PartLayout(tp, cp, *((ep, etp) if config.moe else (1, 1)), rng.random() < 0.5)
        shape, style = MicrobatchShape(rng.choice((1, 2)), 32, rng.choice((0, 16))), rng.choice(STYLES)
        precision = ModelPrecision.of(rng.choice((DType.BF16, DType.BF16, DType.FP8, DType.FP32)))
        attention = rng.choice(("flash", "unfused"))
        try:
            check_setting(config, layout, shape)
        except PiperError:
            layout = PartLayout()
        works = {
            f"{c.name}.{p.name}": part_work(config, c, p, layout, shape, precision, attention, style)
            for c in model_chunks(config)
            for p in c.parts
        }
        messages = dispatch_bytes(config, layout, shape, precision) if config.moe else None
        kept = sum(s.bytes for w in works.values() for s in w.saved)
        flops = sum(w.model_flops for w in works.values())
        room = sum(w.forward_workspace + w.input_grad_workspace + w.weight_grad_workspace for w in works.values())
        yield f"{family} {layout} {shape} {precision.compute} {attention} {style}"
        yield f"  flops {flops} kept {kept} workspace {room} digest {digest((works, messages))}"


def changed(family: str) -> Iterable[str]:
    """What is read of a family's config whose keys are nearly right, or said of it."""
    raw, keys = small(family), [*{k: None for f in FAMILIES.values() for k in f["config"]}]
    for number in range(CHANGES):
        rng, mine = random.Random(f"config {family} {number}"), dict(raw)
        for key in rng.sample([*raw][1:], rng.choice((1, 1, 2))) + rng.sample(keys, rng.choice((0, 0, 1))):
            old = mine.pop(key, rng.choice((1, True, 0.5)))
            numbers = (old * 2, old + 1, -old, old / 3, float(old)) if isinstance(old, int | float) else (old, 2)
            if rng.random() < 0.8:
                mine[key] = rng.choice((*numbers, *numbers, None, 0, True, False, "x", "gelu", [1, 2], {"a": 1}))
        said = " ".join(f"{k}={mine.get(k, '-')}" for k in {**raw, **mine} if mine.get(k, "-") != raw.get(k, "-"))
        try:
            config = config_from(mine, "x")
            parameters = sum(p.numel for c in model_chunks(config) for part in c.parts for p in part.params)
            yield f"{family} {said}: {parameters} {digest(config)}"
        except PiperError as e:
            yield f"{family} {said}: {short(e)}"


def test_drawn_jobs_have_the_plans_they_had(golden: Golden) -> None:
    golden("plans.txt", "\n".join(line for n in range(JOBS) for line in planned(n)) + "\n")


def test_drawn_mixes_have_the_plans_they_had(golden: Golden) -> None:
    golden("mixes.txt", "\n".join(mixed(n) for n in range(MIXES)) + "\n")


def test_drawn_jobs_with_copies_of_shards_have_the_plans_they_had(golden: Golden) -> None:
    lines = (planned(n, dp=4, zero=1 + n % 3, dp_replicate=(2, 2, 4)[n // 3 % 3]) for n in range(60))
    golden("copies.txt", "\n".join(x for job in lines for x in job) + "\n")
    golden("copies_mixed.txt", "\n".join(mixed(n, (2, 4)[n % 2]) for n in range(60)) + "\n")


def test_families_parts_cost_and_keep_what_they_did(golden: Golden) -> None:
    golden("works.txt", "\n".join(line for f in FAMILIES for line in worked(f)) + "\n")


def test_configs_say_what_they_did(golden: Golden) -> None:
    golden("configs.txt", "\n".join(line for f in FAMILIES for line in changed(f)) + "\n")

"""Dispatchers: SMs, copies and sorting do what their table says, and a job that names none is as it was."""

import pytest
from msgspec import structs

from cost_models import LinkFabric, kernel_seconds, message_seconds
from cost_models.compute.interference import KernelSlowdown
from cost_models.software.dispatcher import dispatchers, fp8_casts
from ir.core.errors import PiperError
from ir.core.work import CAST, SORTS, DType, Kernel, KernelKind, Message, MessageKind
from ir.job import load_job
from piper_sim.pricing.prepare import hardware_of, prepare_priced

JOB = {
    "model": {"config": "deepseek-v3", "num_hidden_layers": 4},
    "cluster": {"gpu": "h100-sxm"},
    "parallel": {"dp": 64, "ep": 64},
    "schedule": {"microbatches": 1},
}


def hardware(name: str | None):  # type: ignore[no-untyped-def]
    return hardware_of(load_job(JOB, [f"costs.dispatcher={name}"] if name else []))


@pytest.mark.parametrize("name", dispatchers())
def test_every_value_has_its_source_and_does_what_it_says(name: str) -> None:
    d, hw, plain = dispatchers()[name], hardware(name), hardware(None)
    shares = {n for n in ("inside", "across", "network") if getattr(d, n)}
    assert d.sources.keys() == {"sms", "deduplicate", "permute"} | shares
    assert KernelSlowdown.of(hw).held[0][0] == pytest.approx(d.sms / (hw.sms - d.sms))
    sort, other = (Kernel(KernelKind.MEMORY, 0, 10**10, DType.BF16, (), label) for label in ("permute", "residual"))
    launch = hw.kernel_launch_us * 1e-6
    assert kernel_seconds(sort, hw) == pytest.approx(
        d.permute and launch + d.permute * (kernel_seconds(sort, plain) - launch), rel=1e-3
    )
    assert kernel_seconds(other, hw) == kernel_seconds(other, plain)


def test_without_deduplication_every_copy_crosses_the_network() -> None:
    """Top-8 on 8 nodes: 8 of 8 copies leave 7/8 of the time; deduplicated, one for each of 8(1 - (7/8)^8) nodes."""
    message = Message(MessageKind.ALL_TO_ALL, 8 * 2**30, ("ep",), 8)
    seconds = {n: message_seconds(message, 64, 8, LinkFabric.of(hardware(n))) for n in (None, *dispatchers())}
    assert seconds["nccl"] / seconds["deepep"] == pytest.approx(1 / (1 - (7 / 8) ** 8), rel=0.01)
    assert seconds[None] == seconds["deepep"]
    assert seconds["hybridep"] / seconds["deepep"] == pytest.approx(0.89 / 0.76, rel=1e-3), "the NIC's shares"


# deepseek-ai/DeepEP, docs/README_Hybrid-EP.md @41cad94: Torch API with 16 SMs (GB200: 32), bf16, 4,096 tokens of 7,168
# features, top-8 of 8 experts a rank, drawn evenly; GB/s counted of every copy to another node (inside of one, rank),
# the sender's own among them.
README = [
    ("h100-sxm", 16, 54.47, 53.35), ("h100-sxm", 32, 47.36, 52.53), ("h100-sxm", 64, 41.24, 46.57),
    ("b200-sxm", 8, 535.94, 530.86), ("gb200-nvl72", 8, 545.71, 568.94), ("gb200-nvl72", 16, 523.48, 521.55),
    ("gb200-nvl72", 24, 507.32, 483.76), ("gb200-nvl72", 32, 484.22, 464.54), ("gb200-nvl72", 36, 479.02, 447.89),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "ranks", "dispatch", "combine"), README)
def test_hybrid_ep_takes_what_its_readme_measured(gpu: str, ranks: int, dispatch: float, combine: float) -> None:
    job = load_job(JOB | {"cluster": {"gpu": gpu}}, ["costs.dispatcher=hybridep"])
    hw = structs.replace(hardware_of(job), training=False)
    per_node = min(ranks, hw.gpus_per_node)
    places = ranks // per_node if ranks > per_node else ranks
    token = 4096 * 7168 * 2
    counted = token * places * (1 - (1 - 1 / places) ** 8)
    message = Message(MessageKind.ALL_TO_ALL, 8 * token, ("ep",), 8)
    found = message_seconds(message, ranks, per_node, LinkFabric.of(hw))
    measured = sum(counted / (rate * 1e9) for rate in (dispatch, combine)) / 2
    assert found == pytest.approx(measured, rel=0.1)
    if gpu == "h100-sxm" and ranks == 16:
        other = message_seconds(message, ranks, per_node, LinkFabric.of(structs.replace(hw, dispatcher=None)))
        assert other < 0.7 * measured, "at the rate of one node it is not what was measured"


def test_the_sorts_are_kernels_of_the_model_and_no_dispatcher_changes_its_plan() -> None:
    nodes = prepare_priced(load_job(JOB), hardware(None)).graph().nodes
    labels = {k.label for n in nodes for k in n.work}
    assert set(SORTS) <= labels
    digests = {prepare_priced(load_job(JOB, [f"costs.dispatcher={n}"]), hardware(n)).structure for n in dispatchers()}
    assert len(digests) == 1


def test_more_sms_than_a_device_has_are_refused() -> None:
    with pytest.raises(PiperError, match="leave none to compute"):
        hardware_of(load_job(JOB | {"cluster": {"gpu": "cpu"}}, ["costs.dispatcher=deepep"]))


def test_every_cast_of_a_recipe_is_a_kernel_and_moves_what_it_reads_once_and_writes_twice() -> None:
    job = load_job({**JOB, "precision": {"compute": "fp8"}})
    work = [k for n in prepare_priced(job, hardware(None)).graph().nodes for k in n.work]
    labels = {k.label.removesuffix(CAST) for k in work if k.label.endswith(CAST)}
    assert len(labels) > 9
    for name, casts in fp8_casts().items():
        assert not [c for c in casts if not any(x.endswith(c) for x in labels)], name
        each = [casts.get(k, x) for k, x in (("cast", 4 / 3), ("cast_grad", 4 / 6))]
        assert each == pytest.approx([4 / 3, 4 / 6], rel=1e-3), "read at two bytes, written twice at one"

"""Parts of parts that backward makes again: the same training to the bit, and the memory that the plan says."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from executor.autograd.split import SplitPass
from executor.measure.peak_bytes import peak_bytes
from executor.modules import layers
from executor.modules.attention import attention
from executor.modules.remade import RemadeBufferCall, RemadeBuffers, remade
from ir.core.errors import PiperError
from ir.job import load_job
from piper_sim import predict
from tests.executor.measure.peak_runs import job_file, planned
from tests.executor.measure.test_peak_bytes import SMALL_DEEPSEEK
from tests.executor.runs import Ran, run, same

ALL = 'schedule.recompute=["norm","up_projection","activation"]'
OPERATORS = 'schedule.recompute=["operators"]'
DEEPSEEK = tuple(SMALL_DEEPSEEK.split())
QWEN3 = (
    "model.config=qwen3-8b", "model.hidden_size=64", "model.num_attention_heads=4", "model.num_key_value_heads=2",
    "model.head_dim=16", "model.intermediate_size=128", "model.vocab_size=256",
)  # fmt: skip
MOE = ("model.config=tiny-moe",)
DUAL = ("schedule.name=dualpipe", "parallel.dp=2", "parallel.zero=3")
MIXED = ("precision.compute=bf16", "precision.params=fp32")  # every linear is a seam of its own
CASES = {
    "llama": ("schedule.name=zb1p",),
    "weights in another format": ("schedule.name=zb1p", *MIXED),
    "layer norms": (
        "schedule.name=zbv", "model.config=gpt2", "model.n_layer=4", "model.n_embd=64", "model.n_head=4",
        "model.vocab_size=256", "model.attn_pdrop=0", "model.resid_pdrop=0", "model.embd_pdrop=0",
    ),
    "norms of heads": ("schedule.name=1f1b", *QWEN3),
    "experts of one rank": ("schedule.name=zb1p", *MOE),
    "experts in another format": ("schedule.name=1f1b", *MOE, *MIXED),
    "experts apart": (*DUAL, *MOE, "parallel.ep=2"),
    "latent attention, shared experts": ("schedule.name=zb1p", *DEEPSEEK),
    "latent attention, shared experts apart, two copies": (*DUAL, *DEEPSEEK, "parallel.ep=2"),
    "heads apart": ("schedule.name=zb1p", *QWEN3, "parallel.tp=2"),
    "latent heads apart": ("schedule.name=zb1p", *DEEPSEEK, "parallel.tp=2"),
    "contexts apart": ("schedule.name=1f1b", *QWEN3, "parallel.cp=2"),
    "latent contexts apart": ("schedule.name=zb1p", *DEEPSEEK, "parallel.cp=2"),
    "of some layers": ("schedule.name=zbv", *MOE, "schedule.recompute_layers=1::2"),
}  # fmt: skip


@cache
def _kept(name: str) -> Ran:
    """The run in which nothing is made again."""
    return run(*(s for s in CASES[name] if "recompute_layers" not in s))


@pytest.mark.parametrize("name", CASES)
def test_what_is_made_again_trains_the_same_to_the_bit(name: str) -> None:
    found, wanted = run(*CASES[name], ALL), _kept(name)
    assert found.object["losses"] == wanted.object["losses"] and same(found, wanted)


@pytest.mark.parametrize(
    "name",
    [
        "weights in another format",
        "norms of heads",
        "experts apart",
        "latent attention, shared experts",
        "heads apart",
        "contexts apart",
        "of some layers",
    ],
)
def test_every_second_product_made_again_trains_the_same_to_the_bit(name: str) -> None:
    found, wanted = run(*CASES[name], OPERATORS), _kept(name)
    assert found.object["losses"] == wanted.object["losses"] and same(found, wanted)


@pytest.mark.parametrize(
    ("sets", "other"),
    [
        (("schedule.name=1f1b", "model.attention=unfused"), "scores"),
        (("schedule.name=zb1p", *DEEPSEEK, "parallel.tp=2"), "activation"),
    ],
)
def test_options_beside_others_train_as_those_alone(sets: tuple[str, ...], other: str) -> None:
    assert same(run(*sets, f'schedule.recompute=["norm","{other}"]'), run(*sets, f'schedule.recompute=["{other}"]'))


FEW = ("schedule.name=1f1b", "schedule.microbatches=2")  # as many as are alive at once on two ranks
SPARED = {"llama": FEW, "weights in another format": (*FEW, *MIXED), "experts": (*FEW, *MOE)}
ALIKE = (*FEW, *QWEN3)


def peaks(*sets: str) -> tuple[Sequence[int], list[int]]:
    """Of each rank: of a run, and of the prediction."""
    real, sim = peak_bytes(*planned(*sets)) or (), predict(load_job(job_file(), sets)).planned.memory.peak
    return real, sim.tolist()


most = cache(peaks)  # where nothing is made again


def saved(model: tuple[str, ...], again: str) -> tuple[list[int], list[int]]:
    """Bytes less at each rank's peak: of a run, and of the prediction."""
    kept, less = most(*model, "schedule.recompute=none"), peaks(*model, f"schedule.recompute={again}")
    real, sim = ([a - b for a, b in zip(*both, strict=True)] for both in zip(kept, less, strict=True))
    return real, sim


@pytest.mark.parametrize("again", ['["norm"]', '["activation"]'])
@pytest.mark.parametrize("name", SPARED)
def test_it_spares_what_the_plan_says_to_the_byte(name: str, again: str) -> None:
    real, sim = saved(SPARED[name], again)
    assert real == sim and min(real) > 0


@pytest.mark.parametrize("again", ['["norm"]', '["up_projection"]', '["norm","up_projection","activation"]'])
def test_latent_attention_and_shared_experts_spare_what_the_plan_says(again: str) -> None:
    """A tenth less: what shared experts and the gate both read goes when both are done, in the plan with the former."""
    (real, last), (sim, none) = saved(("schedule.name=zb1p", "schedule.microbatches=2", *DEEPSEEK), again)
    assert 0.9 * sim < real <= sim and last == none == 0


@pytest.mark.parametrize("sets", [SPARED["llama"], SPARED["weights in another format"], ALIKE, CASES["layer norms"]])
def test_every_second_product_spares_what_the_plan_says(sets: tuple[str, ...]) -> None:
    """To the byte, but where the loss is: there another moment holds most, and other small tensors with it."""
    real, sim = saved(sets, '["operators"]')
    assert real[0] == sim[0] and real[-1] == pytest.approx(sim[-1], rel=0.01) and min(real) > 0


def test_experts_one_after_the_other_stand_beside_their_product() -> None:
    """As float64 has it: once more what gate and up give, while it is made again."""
    real, sim = saved(SPARED["experts"], '["operators"]')
    rows, width = 2 * 160 * 2, 2 * 32
    assert [a - b for a, b in zip(sim, real, strict=True)] == pytest.approx([8 * rows * width] * 2, rel=0.1)


def test_products_kept_all_the_same_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is no product is made again alone."""
    for module in (layers, attention):
        monkeypatch.setattr(module, "remade_as", lambda *of: None)
    real, sim = saved(SPARED["llama"], '["operators"]')
    assert real[0] < 0.9 * sim[0]


def test_kept_all_the_same_it_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: nobody says what may be made again."""
    monkeypatch.setattr("executor.runtime.rank_model.remade_values", lambda prepared: {})
    real, sim = saved(SPARED["llama"], '["norm"]')
    assert max(real) == 0 < min(sim)


class Two(torch.nn.Module):
    """Two linears that read one value, which may be made again; made: how often it was."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.one, self.other = (torch.nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = remade("norm", self.double, x)
        return (self.one(y) * self.other(y)).sum()

    def double(self, x: torch.Tensor) -> torch.Tensor:
        self.made += 1
        return 2 * x


def graded(module: Two, passes: Sequence[str], *options: str) -> tuple[bool, list[int]]:
    """Whether weight gradients are plain torch's; how often the value had been made behind each pass."""
    x, grads = torch.ones(2, 4, dtype=torch.float64), dict[str, torch.Tensor]()
    run = SplitPass(dict(module.named_parameters()), grads.__setitem__, remade=RemadeBuffers(options))
    run.forward(module, x)
    made = []
    for name in passes:
        getattr(run, name)()
        made.append(module.made)
    assert run.remade is not None and not run.remade.reads
    module(x).backward()
    return all(torch.equal(grads[n], p.grad) for n, p in module.named_parameters() if p.grad is not None), made


def test_it_is_made_by_r_or_by_who_asks_first() -> None:
    assert graded(Two(), ["remake", "input_grad", "weight_grad"], "norm") == (True, [2, 2, 2])
    assert graded(Two(), ["input_grad", "weight_grad"], "norm") == (True, [1, 2]), "input gradients read weights alone"
    assert graded(Two(), ["remake", "input_grad", "weight_grad"], "activation") == (True, [1, 1, 1])


def test_what_was_made_goes_with_its_last_reader() -> None:
    module, x = Two(), torch.ones(2, 4, dtype=torch.float64)
    run = SplitPass(dict(module.named_parameters()), lambda name, grad: None, remade=RemadeBuffers({"norm"}))
    run.forward(module, x)
    assert run.remade is not None
    (call,) = run.remade.reads
    assert call.made is None
    run.remake()
    run.input_grad()
    assert call.made is not None, "weight gradients read it still"
    run.weight_grad()
    assert call.made is None


def test_other_bits_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what backward reads is what was made again."""
    again = RemadeBufferCall.again

    def off(self: RemadeBufferCall) -> tuple[torch.Tensor, ...]:
        if self.made is None:
            self.made = tuple(t + 1e-15 for t in again(self))
        return self.made

    monkeypatch.setattr(RemadeBufferCall, "again", off)
    assert not graded(Two(), ["input_grad", "weight_grad"], "norm")[0]


REFUSED = {
    "compiled": (f"{ALL} run.compile=true", "schedule.recompute"),
    "keys exchanged": (f"{OPERATORS} parallel.cp=2 parallel.cp_comm=all_to_all", "schedule.recompute"),
    "exchanged": (" ".join((ALL, *QWEN3, "parallel.cp=2", "parallel.cp_comm=all_to_all")), "schedule.recompute"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rank_makes_again_by_itself_is_refused(name: str) -> None:
    sets, key = REFUSED[name]
    with pytest.raises(PiperError) as e:
        run(*sets.split())
    assert e.value.key == key

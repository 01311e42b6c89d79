"""torch's checkpoint recomputes a layer up to the last value that backward reads: counted in torch and in the graph."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ir.core.ops import Pass
from ir.core.work import MessageKind
from ir.graph.graph import GraphNode
from ir.job import load_job
from piper_sim.pricing.prepare import hardware_of, prepare_priced


class Products(TorchDispatchMode):
    """Counts matrix products."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


class Mlp(nn.Module):
    """x + down(silu(gate(x)) · up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        out: Tensor = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


def _again(early: bool) -> int:
    """Products of a layer's forward that torch runs in backward."""
    counts = []
    for recomputed in (False, True):
        layer, x = Mlp(), torch.ones(4, 8, requires_grad=True)
        with set_checkpoint_early_stop(early), Products() as products:
            y: Any = checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
            y.sum().backward()
        counts.append(products.found)
    return counts[1] - counts[0]


def test_torch_does_not_make_a_layers_last_product_again() -> None:
    assert _again(early=True) == 2, "gate and up"
    assert _again(early=False) == 3, "the control: and down"


def _recomputed(software: str, *sets: str) -> list[GraphNode]:
    model = {"model": {"config": "tiny-llama", "seq_len": 64}, "schedule": {"recompute": "full"}}
    job = load_job(model, [f"costs.software={software}", "parallel.tp=2", *sets])
    graph = prepare_priced(job, hardware_of(job)).graph()
    return [n for n in graph.nodes if n.kind is Pass.R and n.part.startswith("l1.")]


@pytest.mark.parametrize("software", ["transformers", "torchtitan", "torchtitan-compiled"])
def test_the_graph_leaves_it_out(software: str) -> None:
    attn, mlp = _recomputed(software)
    labels = [k.label for k in mlp.work]
    assert any("gate" in x for x in labels) and not any("down" in x or x == "residual" for x in labels)
    assert [m.kind for m in mlp.inline] == [MessageKind.ALL_GATHER], "what it would sum is not there"
    assert any("o_proj" in k.label for k in attn.work) and attn.writes[0].bytes > 0, "which the rest of the layer reads"
    assert mlp.writes[0].bytes == 0 and mlp.writes[1].bytes > 0


def test_megatron_runs_all_of_it_again() -> None:
    _, mlp = _recomputed("megatron-core")
    assert [k.label for k in mlp.work][-2:] == ["down_proj", "residual"]
    assert [m.kind for m in mlp.inline] == [MessageKind.ALL_GATHER, MessageKind.REDUCE_SCATTER]


def test_experts_are_read_by_their_weights_gradients() -> None:
    nodes = _recomputed("transformers", "model.config=tiny-moe")
    assert any("down" in k.label for n in nodes for k in n.work)

"""What `op_by_op` says that a layer keeps, beside what autograd saves of transformers' own."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ir.workload import config_from
from ir.workload.setting import KernelStyle, MicrobatchShape
from tests.ir.workload import models

transformers = pytest.importorskip("transformers")

BATCH, TOKENS, H = 2, 64, 64
LLAMA = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": H,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 512,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,  # on a CPU masks are as wide as what they mask
    "embd_pdrop": 0.0,
    "activation_function": "gelu_new",
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16}


def saved_by_autograd(raw):
    """Bytes of the tensors that backward of one layer's forward reads, without weights and angles."""
    config = transformers.CONFIG_MAPPING[raw["model_type"]](**{k: v for k, v in raw.items() if k != "model_type"})
    config._attn_implementation = "sdpa"
    model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16).train()
    layer = (model.layers if hasattr(model, "layers") else model.h)[0]
    x = torch.randn(BATCH, TOKENS, H, dtype=torch.bfloat16, requires_grad=True)
    known = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    more = {}
    if hasattr(model, "rotary_emb"):
        angles = model.rotary_emb(x, torch.arange(TOKENS)[None])
        known |= {a.untyped_storage().data_ptr() for a in angles}
        more["position_embeddings"] = angles
    found = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in known:
            found[t.untyped_storage().data_ptr()] = (t.untyped_storage().nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x, **more)
    del y
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("raw", [LLAMA, QWEN3, GPT2], ids=lambda raw: raw["model_type"])
def test_a_layer_keeps_what_autograd_saves_of_it(raw):
    config, shape = config_from(raw, "small"), MicrobatchShape(BATCH, TOKENS)
    style = KernelStyle(op_by_op=True)
    parts = [models.work(config, 1, name, shape=shape, style=style) for name in ("attn", "mlp")]
    stream = 2 * BATCH * TOKENS * H  # what enters a layer, and what its attention adds to
    kept = sum(s.bytes for w in parts for s in w.saved) + 2 * stream
    assert kept == pytest.approx(saved_by_autograd(raw), rel=0.01)
    fused = [models.work(config, 1, name, shape=shape, style=KernelStyle()) for name in ("attn", "mlp")]
    assert sum(s.bytes for w in fused for s in w.saved) + 2 * stream < 0.8 * kept


MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
VIEWS = {
    "view",
    "t",
    "transpose",
    "slice",
    "select",
    "detach",
    "expand",
    "unsqueeze",
    "split",
    "_unsafe_view",
    "empty_like",
}


class Launches(TorchDispatchMode):
    """Ops that are no views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


def test_experts_launch_as_many_kernels_as_transformers():
    given = {k: v for k, v in MIXTRAL.items() if k != "model_type"}
    config = transformers.CONFIG_MAPPING["mixtral"](**given)
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    block = transformers.AutoModel.from_config(config, dtype=torch.bfloat16).layers[0].mlp
    with Launches() as found:
        block(torch.randn(BATCH, TOKENS, H, dtype=torch.bfloat16))
    config, shape = config_from(MIXTRAL, "small"), MicrobatchShape(BATCH, TOKENS)

    def launched(style):
        parts = [models.work(config, 1, name, shape=shape, style=style).forward for name in ("router", "experts")]
        return sum(k.count for part in parts for k in part if "norm" not in k.label)

    assert launched(KernelStyle(op_by_op=True)) == pytest.approx(found.count, rel=0.15)
    assert launched(KernelStyle()) < 0.5 * found.count

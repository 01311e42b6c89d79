"""A user's exported chunks run on a GPU: what they make is there. Fake tensors know their device, and no values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from executor.device.placed import place
from executor.modules.user.model import UserModel

CUDA, SIZE, LENGTH = torch.device("cuda", 0), 2, 16
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def _gemma() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=16, sliding_window=8))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=4, num_local_experts=4))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0))


def _moved(unit: nn.Module) -> None:
    """As `Module.to` moves them. Fake parameters of a GPU that is not there want no gradients."""
    for module in unit.modules():
        for held in (module._parameters, module._buffers):
            for name, t in held.items():
                if t is not None:
                    held[name] = torch.empty(t.shape, dtype=t.dtype, device=CUDA)


def _logits(model: UserModel, units: list[nn.Module]) -> Tensor:
    ids = torch.zeros(SIZE, LENGTH, dtype=torch.int64, device=CUDA)
    x: tuple[Tensor, ...] = (ids,)
    for name, unit in zip(model.chunks, units, strict=True):
        draws = (torch.zeros(3, dtype=torch.int64, device=CUDA),) if name in model._cut.wants_draws else ()
        found = unit(*x, *((ids,) if name in model._cut.wants_ids else ()), *draws)
        x = found if isinstance(found, tuple) else (found,)
    return x[0]


@pytest.mark.parametrize("build", [_llama, _gemma, _mixtral, _gpt2])
def test_chunks_of_a_user_s_module_run_where_they_are_placed(build: Callable[[], nn.Module]) -> None:
    layers = "transformer.h.*" if build is _gpt2 else "model.layers.*"
    model = UserModel(build, tags={"PP": layers}, batch=(SIZE, LENGTH))
    units = list(model._cut.chunks.values())
    with torch.no_grad(), FakeTensorMode():
        for unit in units:
            _moved(unit)
        with pytest.raises(RuntimeError, match="cpu"):  # the control
            _logits(model, units)
        for unit in units:
            place(unit, CUDA)
        found = _logits(model, units)
    assert found.device == CUDA and found.shape == (SIZE, LENGTH, 256)

"""State sizes are exact; the update's traffic is counted tensor by tensor."""

import pytest

from cost_models import load_hardware, work_seconds
from cost_models.compute.optimizer import (
    OptimizerMemory,
    OptimizerPrecision,
    clip,
    grad_norm,
    offloaded_seconds,
    shard,
    state_bytes,
    update,
    zero_grads,
)
from ir.core.work import DType, KernelKind

BF16, FP32, FP64 = DType.BF16, DType.FP32, DType.FP64


@pytest.mark.parametrize(
    "recipe, each",
    [
        (OptimizerPrecision(), (2, 4, 12)),  # Megatron: 18 bytes per parameter
        (OptimizerPrecision(grads=BF16), (2, 2, 12)),  # 16, as Zero Bubble's runs
        (OptimizerPrecision(params=FP32), (4, 4, 8)),  # no master copy
        (OptimizerPrecision(params=FP64, grads=FP64, optimizer=FP64), (8, 8, 16)),
        (OptimizerPrecision(optimizer=BF16), (2, 4, 4)),  # all-bf16: moments only
        (OptimizerPrecision(name="sgd"), (2, 4, 4)),  # only a master copy
        (OptimizerPrecision(name="sgd", params=FP32), (4, 4, 0)),
        (OptimizerPrecision(params=FP32, optimizer=BF16), (4, 4, 4)),  # weights are their own masters, as Megatron's
        (OptimizerPrecision(name="sgd", params=FP64, grads=FP64), (8, 8, 0)),
    ],
)
def test_bytes_per_parameter(recipe: OptimizerPrecision, each: tuple[int, int, int]) -> None:
    state = state_bytes(1000, recipe)
    assert state == OptimizerMemory(*(1000 * b for b in each))
    assert state.total == 1000 * sum(each)


def test_zero_stages_divide_with_ceiling() -> None:
    recipe, n = OptimizerPrecision(), 1001
    assert state_bytes(n, recipe, optimizer_shards=8).optimizer == 126 * 12
    assert state_bytes(n, recipe, grads_shards=8, optimizer_shards=8).gradients == 126 * 4
    assert state_bytes(n, recipe, 8, 8, 8).parameters == 126 * 2
    assert state_bytes(n, recipe, optimizer_shards=8).parameters == n * 2
    assert state_bytes(0, recipe, 8, 8, 8).total == 0


@pytest.mark.parametrize("numel, shards", [(-1, 1), (1, 0)])
def test_impossible_shards_are_refused(numel: int, shards: int) -> None:
    with pytest.raises(ValueError, match="cannot cut"):
        shard(numel, shards)


@pytest.mark.parametrize(
    "recipe, moved",
    [
        (OptimizerPrecision(), 4 + 4 * 4 + 2 * 4 + 2),  # grad; m, v; master; weight
        (OptimizerPrecision(params=FP32), 4 + 4 * 4 + 2 * 4),  # grad; m, v; weight in place
        (OptimizerPrecision(name="sgd"), 4 + 2 * 4 + 2),
        (OptimizerPrecision(name="sgd", params=FP32), 4 + 2 * 4),
    ],
)
def test_an_update_moves_each_tensor_once(recipe: OptimizerPrecision, moved: int) -> None:
    assert update(10, recipe).bytes == 10 * moved


def test_the_other_passes_over_gradients() -> None:
    recipe = OptimizerPrecision()
    assert [k(10, recipe).bytes for k in (grad_norm, clip, zero_grads)] == [40, 80, 40]
    assert all(k(10, recipe).kind is KernelKind.MEMORY for k in (update, grad_norm, clip, zero_grads))
    with pytest.raises(ValueError, match="elements"):
        update(-1, recipe)


def test_an_update_is_bound_by_memory() -> None:
    # 1e9 parameters on A100: 30 GB at 1.59 TB/s.
    seconds = work_seconds((update(10**9, OptimizerPrecision()),), load_hardware("a100-sxm-80gb"))
    assert seconds == pytest.approx(30e9 / (2039e9 * 0.78), rel=0.01)


def test_the_host_updates_its_share_and_keeps_it() -> None:
    """Moments and master weights are the host's; gradients come down, weights go up, the slowest part decides."""
    half = OptimizerPrecision(offload=0.5)
    assert state_bytes(1001, half) == OptimizerMemory(2002, 4004, 501 * 12)
    assert state_bytes(1001, OptimizerPrecision(offload=1.0), 1, 1, 8).optimizer == 0
    assert update(1001, half).bytes == 501 * 30
    n = 10**9
    assert offloaded_seconds(n, half, host_GBps=15, pcie_GBps=100) == pytest.approx(0.5 * 30 / 15)
    assert offloaded_seconds(n, half, host_GBps=1000, pcie_GBps=10) == pytest.approx(0.5 * 4 / 10)
    assert offloaded_seconds(n, OptimizerPrecision(), 15, 10) == 0

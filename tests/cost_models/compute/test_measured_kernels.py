"""Kernels and collectives measured by themselves, a sample of the tables that the hardware files are fitted to."""

from statistics import median, quantiles

import pytest

from experiments.kernels import errors, main
from experiments.published.rows import DATA

FOUND = errors(DATA / "kernels")
SWAPPED = errors(DATA / "kernels", {"a100": "h100", "h100": "b200", "h200": "b200", "b200": "h100"})


def sizes(found, kind, gpu, of):
    return [abs(e) for e in found[kind, gpu, of]]


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "b200"])
def test_products_by_shape(gpu):
    found = sizes(FOUND, "gemm", gpu, "bf16")
    assert len(found) == 60
    assert median(found) < 0.05 and quantiles(found, n=10)[-1] < 0.16
    # Negative control: another GPU's file.
    assert median(sizes(SWAPPED, "gemm", gpu, "bf16")) > 0.25


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_collectives_of_a_node(gpu, kind):
    assert median(sizes(FOUND, "nccl", gpu, kind)) < 0.11
    assert median(sizes(SWAPPED, "nccl", gpu, kind)) > 0.15


def test_the_table_prints(capsys):
    assert main([]) == 0
    assert "gemm       h200  bf16              60 median" in capsys.readouterr().out

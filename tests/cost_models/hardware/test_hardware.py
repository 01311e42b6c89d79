"""Hardware files: what ships is complete and sourced; what is doubtful is refused with the key and the nearest fix."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cost_models.hardware import DeviceHardware, load_hardware, presets
from ir.core.errors import ErrorKind, PiperError
from ir.core.work import DType

CONTRACT = {"a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm", "h800-sxm", "h200-sxm", "b200-sxm", "mi300x", "cpu"}
Edits = dict[str, Any]


def written(tmp_path: Path, edits: Edits, base: str = "h100-sxm") -> Path:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"base": base, "name": "mine", **edits}))
    return path


def refused(name: str | Path, overrides: Edits | None = None) -> PiperError:
    with pytest.raises(PiperError) as caught:
        load_hardware(name, overrides)
    assert caught.value.kind is ErrorKind.HARDWARE
    assert caught.value.kind.exit_code == 2
    return caught.value


def test_the_contract_names_are_all_there() -> None:
    assert set(presets()) >= CONTRACT


@pytest.mark.parametrize("name", presets())
def test_every_value_of_a_preset_names_its_source(name: str) -> None:
    hw = load_hardware(name)
    assert hw.name == name
    optional = {"nvlink_pair_GBps", "nvlink_sharp_efficiency", "comm_sms", "comm_hbm", "leaf_nodes", "oversubscription"}
    optional |= {"nic_congestion", "cast_efficiency", "nvlink_few", "nvlink_ramp_KiB", "host_GBps"}
    optional |= {
        "comm_slowed",
        "host_speed",
        "all_to_all_spread",
        "fp8_recipe",
        "multi_tensor_efficiency",
        "power_W",
        "rated_W",
        "power_exponent",
        "recurrence",
    }
    of_jobs = {"software", "dispatcher", "training", "deterministic", "blocking", "fused_experts"}
    keys = {f.name for f in structs.fields(DeviceHardware)} - {"name", "sources", *of_jobs}
    assert keys - optional <= set(hw.sources), "a value without a source"
    assert set(hw.sources) <= keys, "a source without a value"
    assert hw.recurrence is None or "recurrence" in hw.sources
    assert hw.rated_W is None or {"rated_W", "power_exponent"} <= set(hw.sources)


@pytest.mark.parametrize(
    "name, nic, nvlink",
    [("a100-sxm-80gb", 200, 300), ("h100-sxm", 400, 450), ("h800-sxm", 400, 200), ("h200-sxm", 400, 450)],
)
def test_links_are_the_contracts(name: str, nic: float, nvlink: float) -> None:
    hw = load_hardware(name)
    assert (hw.nic_Gbps, hw.nvlink_GBps, hw.gpus_per_node) == (nic, nvlink, 8)


def test_units_are_what_the_keys_say() -> None:
    hw = load_hardware("a100-sxm-80gb")
    assert hw.hbm_bytes == int(79.15 * 2**30)
    assert hw.hbm_bytes_per_s == 2039e9
    assert hw.peak_flops(DType.BF16) == 312e12


def test_overrides_win_and_merge_tables() -> None:
    hw = load_hardware("h100-sxm", {"nic_Gbps": 100, "attention": {"ramp_tokens": 7}})
    assert (hw.nic_Gbps, hw.attention.ramp_tokens, hw.attention.forward_efficiency) == (100, 7, 0.645)
    assert load_hardware("h100-sxm").nic_Gbps == 400, "an override leaks into the preset"


@pytest.mark.parametrize("name, told", [("h100-sxm", "at most 700"), ("cpu", "no rated_W")])
def test_a_power_limit_is_one_that_the_rates_are_known_below(name: str, told: str) -> None:
    error = refused(name, {"power_W": 701})
    assert error.key == "cluster.power_W" and told in str(error)


def test_a_file_may_start_from_a_preset(tmp_path: Path) -> None:
    hw = load_hardware(written(tmp_path, {"hbm_GiB": 94.0}))
    assert (hw.name, hw.hbm_GiB, hw.sms) == ("mine", 94.0, 132)


def test_a_file_may_start_from_the_file_beside_it(tmp_path: Path) -> None:
    written(tmp_path, {"hbm_GiB": 94.0})
    (tmp_path / "yours.json").write_text('{"base": "mine.json", "name": "yours", "nic_Gbps": 50}')
    hw = load_hardware(tmp_path / "yours.json")
    assert (hw.hbm_GiB, hw.nic_Gbps) == (94.0, 50)


def test_unknown_preset_names_the_nearest() -> None:
    error = refused("h800-smx")
    assert error.key == "cluster.gpu" and error.suggestion == "h800-sxm" and "mi300x" in str(error.allowed)


@pytest.mark.parametrize(
    "overrides, key, fix",
    [
        ({"nvlink_GBs": 200}, "cluster.nvlink_GBs", "cluster.nvlink_GBps"),
        ({"gemm": {"ramp": 3}}, "cluster.gemm.ramp", "cluster.gemm.ramp_bytes"),
        ({"nic_Gbps": -1}, "cluster.nic_Gbps", None),
        ({"nic_Gbps": 0}, "cluster.nic_Gbps", None),
        ({"nic_Gbps": float("nan")}, "cluster.nic_Gbps", None),
        ({"hbm_GiB": float("inf")}, "cluster.hbm_GiB", None),
        ({"attention": {"ramp_tokens": float("nan")}}, "cluster.attention.ramp_tokens", None),
        ({"nic_Gbps": "400"}, "cluster.nic_Gbps", None),
        ({"nic_Gbps": True}, "cluster.nic_Gbps", None),
        ({"sms": 1.5}, "cluster.sms", None),
        ({"memory_efficiency": 1.2}, "cluster.memory_efficiency", None),
        ({"collectives": "mpi"}, "cluster.collectives", None),
        ({"peak_TFLOPs": {"bf61": 1.0}}, "cluster.peak_TFLOPs.bf61", "cluster.peak_TFLOPs.bf16"),
        ({"gemm": {"tiles": []}}, "cluster.gemm.tiles", "[[128, 128, 1.0]]"),
        ({"reserved_over_allocated": [1.1, 1.0, 1.2]}, "cluster.reserved_over_allocated", "[1.0, 1.04, 1.08]"),
    ],
)
def test_bad_overrides_are_refused(overrides: Edits, key: str, fix: str | None) -> None:
    error = refused("h100-sxm", overrides)
    assert error.key == key
    if fix:
        assert error.suggestion == fix


def test_errors_in_a_file_name_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, {"hbm_GB": 80})
    error = refused(path)
    assert (error.file, error.key, error.suggestion) == (str(path), "hbm_GB", "hbm_GiB = 74.5058")
    assert refused(written(tmp_path, {"hbm_GiB": -80})).file == str(path)


def test_a_key_left_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bare.json").write_text('{"name": "bare"}')
    assert "missing" in refused(tmp_path / "bare.json").message


@pytest.mark.parametrize("text", ["[1]", "{", '{"nic_Gbps": NaN}', "", '{"base": "h100-sxm", "nic_Gbps": 1e-300}'])
def test_broken_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    assert refused(tmp_path / "broken.json").file == str(tmp_path / "broken.json")


def test_bases_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"base": "b.json"}')
    (tmp_path / "b.json").write_text('{"base": "a.json"}')
    assert "circle" in refused(tmp_path / "a.json").message


def test_a_missing_file_is_an_io_error(tmp_path: Path) -> None:
    with pytest.raises(PiperError) as caught:
        load_hardware(tmp_path / "none.json")
    assert caught.value.kind is ErrorKind.IO


def test_a_dtype_without_arithmetic_is_refused() -> None:
    with pytest.raises(PiperError, match="a100-sxm-80gb has no fp8") as caught:
        load_hardware("a100-sxm-80gb").peak_flops(DType.FP8)
    assert caught.value.allowed == "fp64, fp32, bf16, fp16"


@pytest.mark.parametrize("key", ["efficiency", "unhidden_memory"])
def test_a_peak_without_what_is_reached_of_it_is_refused(tmp_path: Path, key: str) -> None:
    other = ({"efficiency", "unhidden_memory"} - {key}).pop()
    edits = {"peak_TFLOPs": {"fp8": 600.0}, "gemm": {other: {"fp8": 0.5}}}
    error = refused(written(tmp_path, edits, "a100-sxm-80gb"))
    assert (error.key, error.suggestion) == (f"gemm.{key}", f"add fp8 to gemm.{key}")

"""`piper-sim simulate` as the contract has it: keys, sums, what fits, --set, the same bytes out."""

import random
from pathlib import Path
from typing import Any

import pytest

KEYS = (
    "schema_version iteration_s iteration_s_interval tokens_per_s tokens_per_s_per_gpu model_tflops_per_gpu mfu "
    "time_breakdown bubble_fraction exposed_comm_s fits memory parameters ops folded host_model interference_level "
    "messages software cost_source cost_shares warnings plan_digest cost_digest job_digest"
)
BREAKDOWN = (
    "compute recompute slowdown exposed_tp exposed_cp exposed_ep exposed_dp exposed_pp dependency host optimizer"
)
MEMORY = "parameters gradients optimizer activations buffers workspace context"
GIB = 2**30


def words(text: str) -> list[str]:
    return text.split()


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [x for v in value.values() for x in numbers(v)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def check(found: dict[str, Any], code: int, gpus: int, tokens: int) -> None:
    """Every sentence of the contract that holds for any job."""
    assert set(words(KEYS)) <= set(found)
    assert min(numbers(found)) > -1e-9, "no time, rate or size is negative"
    ranks, step, memory = list(found["time_breakdown"]), found["iteration_s"], found["memory"]
    assert ranks == [str(r) for r in range(len(ranks))]
    for row in found["time_breakdown"].values():
        assert list(row) == words(BREAKDOWN)
        assert sum(row.values()) == pytest.approx(step, rel=1e-9)
    rows = list(found["time_breakdown"].values())
    assert found["bubble_fraction"] == pytest.approx(sum(r["dependency"] for r in rows) / (len(rows) * step), abs=1e-9)
    exposed = sum(v for r in rows for k, v in r.items() if k.startswith("exposed_")) / len(rows)
    assert found["exposed_comm_s"] == pytest.approx(exposed, abs=1e-9)
    assert found["tokens_per_s"] == pytest.approx(tokens / step)
    assert found["tokens_per_s_per_gpu"] == pytest.approx(tokens / step / gpus)
    assert 0 < found["mfu"] < 1 and type(found["ops"]) is int and found["ops"] > 0
    assert set(found["folded"]) == {"replicas_simulated", "replicas"}
    for key in ("plan_digest", "cost_digest", "job_digest"):
        assert len(found[key]) == 64 and int(found[key], 16) >= 0
    for r in ranks:
        parts = memory["breakdown_bytes"][r]
        assert list(parts) == words(MEMORY)
        allocated = sum(v for k, v in parts.items() if k != "context")
        assert allocated == memory["peak_allocated_bytes"][r] <= memory["peak_reserved_bytes"][r]
        assert memory["device_peak_bytes"][r] == memory["peak_reserved_bytes"][r] + parts["context"]
        assert min(parts["parameters"], parts["gradients"], parts["activations"]) > 0
        assert memory["cache_bytes"][r] + sum(parts.values()) == memory["device_peak_bytes"][r]
    assert 0 < memory["fits_probability"] < 1
    low, high = found["iteration_s_interval"]
    assert 0.5 < low / found["iteration_s"] < high / found["iteration_s"] < 3
    fits = max(memory["device_peak_bytes"].values()) <= memory["capacity_bytes"] - memory["margin_bytes"]
    assert found["fits"] is fits and code == (0 if fits else 3)
    assert ("reason" in found) is not fits


def test_the_object_has_every_key_and_its_sums_hold(cli: Any, job: Any) -> None:
    result = cli("simulate", job())
    check(result.json, result.code, gpus=4, tokens=2 * 4 * 128)
    assert list(result.json) == words(KEYS)
    assert result.json["memory"]["capacity_bytes"] == int(79.1 * GIB)
    assert result.json["memory"]["margin_bytes"] == 2 * GIB
    assert result.json["folded"] == {"replicas_simulated": 1, "replicas": 2}


# Each list is drawn from; a job is written for every seed. Sizes that do not go together are a refusal, never a crash.
MODELS = {
    "llama3-8b": 1,
    "gpt3-175b": 1,
    "mixtral-8x7b": 8,
    "qwen3-30b-a3b": 128,
    "deepseek-v3": 256,
    "tiny-llama": 1,
    "tiny-moe": 8,
    "piper-1b": 4,
    "nemotron-15b": 1,
    "gpt2": 1,
}
SCHEDULES = words("gpipe 1f1b interleaved-1f1b looped-bfs zb1p zb2p zbv v-half v-min dualpipe dualpipev")
SCHEDULES += words("1f1b-overlap interleaved-1f1b-overlap")
GPUS = words("a100-sxm-40gb h100-sxm b200-sxm mi300x gb200-nvl72")
RECOMPUTE = ["none", "selective", "full", ["norm"], ["mlp", "attention"], ["norm", "up_projection", "activation"]]


def draw(rng: random.Random) -> tuple[dict[str, dict[str, object]], int, int]:
    config = rng.choice(list(MODELS))
    experts = MODELS[config]
    tp, cp, pp, dp = rng.choice([1, 2, 4]), rng.choice([1, 1, 2]), rng.choice([1, 2, 4]), rng.choice([1, 2, 3, 4])
    ep = rng.choice([e for e in (1, 2, 4) if experts % e == 0 and tp * cp * dp % e == 0])
    mbs, size, seq = rng.choice([1, 2, 3, 8]), rng.choice([1, 2]), rng.choice([128, 512])
    sections: dict[str, dict[str, object]] = {
        "model": {"config": config, "seq_len": seq, "attention": rng.choice(["flash", "unfused"])},
        "cluster": {"gpu": rng.choice(GPUS)},
        "parallel": {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "zero": rng.randrange(4)},
        "schedule": {
            "name": rng.choice(SCHEDULES),
            "microbatches": mbs,
            "microbatch_size": size,
            "recompute": rng.choice(RECOMPUTE),
        },
        "optimizer": {"name": rng.choice(["adamw", "sgd"]), "clip_norm": rng.choice([0, 1])},
        "precision": {"compute": rng.choice(["bf16", "bf16", "fp32", "fp8"])},
    }
    if config != "gpt2":
        sections["model"]["num_hidden_layers"] = 8
    if rng.random() < 0.3:
        sections["parallel"] |= {"bucket_MiB": rng.choice([5, 50]), "prefetch": rng.randrange(3)}
    return sections, tp * cp * pp * dp, dp * mbs * size * seq


def simulate_random(cli: Any, job: Any, seed: int) -> bool:
    sections, gpus, tokens = draw(random.Random(seed))
    result = cli("simulate", job(**sections))
    if "error" in result.json:
        assert result.code == 2, (seed, result.out)
        error = result.error
        assert error["file"] and error["key"] and error["message"] and (error["suggestion"] or error["allowed"])
        return False
    check(result.json, result.code, gpus, tokens)
    return True


@pytest.mark.parametrize("seed", range(40))
def test_random_jobs_hold_the_contract_or_are_refused(cli: Any, job: Any, seed: int) -> None:
    simulate_random(cli, job, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_jobs_hold_the_contract_or_are_refused(cli: Any, job: Any, block: int) -> None:
    done = sum(simulate_random(cli, job, seed) for seed in range(1000 + 100 * block, 1100 + 100 * block))
    assert done > 50, "most draws are real jobs"


def test_what_does_not_fit_prints_all_of_it_and_exits_3(cli: Any, job: Any) -> None:
    small = cli("simulate", job(), "--set", "cluster.hbm_GiB=2.001")
    assert small.code == 3 and small.json["fits"] is False
    assert list(small.json) == [*words(KEYS), "reason"]
    assert "GiB" in small.json["reason"] and "rank" in small.json["reason"]
    assert small.json["iteration_s"] == cli("simulate", job()).json["iteration_s"]
    text = cli("simulate", job(), "--set", "cluster.hbm_GiB=2.001", as_json=False)
    assert text.code == 3 and "does not fit" in text.out


def test_fits_turns_exactly_at_the_device_peak(cli: Any, job: Any) -> None:
    peak = max(cli("simulate", job()).json["memory"]["device_peak_bytes"].values())
    for spare, code in ((0, 0), (-1, 3)):
        room = f"cluster.hbm_GiB={(peak + spare) / GIB!r}"
        assert cli("simulate", job(), "--set", room, "--set", "cluster.memory_margin_GiB=0").code == code


@pytest.mark.parametrize(
    ("setting", "same_as"),
    [
        ("schedule.name=zbv", {"schedule": {"name": "zbv"}}),
        ('schedule.name = "zbv"', {"schedule": {"name": "zbv"}}),
        ("parallel.zero=3", {"parallel": {"zero": 3}}),
        ("parallel.layers=[1, 3]", {"parallel": {"layers": [1, 3]}}),
        ("schedule.recompute=full", {"schedule": {"recompute": "full"}}),
        ('schedule.recompute=["norm"]', {"schedule": {"recompute": ["norm"]}}),
        ("model.num_hidden_layers=6", {"model": {"num_hidden_layers": 6}}),
        ("cluster.nic_Gbps=100", {"cluster": {"nic_Gbps": 100}}),
        ("optimizer.clip_norm=0.0", {"optimizer": {"clip_norm": 0.0}}),
        ("costs.interference=none", {"costs": {"interference": "none"}}),
    ],
)
def test_set_says_what_the_file_could_say(cli: Any, job: Any, setting: str, same_as: dict[str, Any]) -> None:
    by_flag, by_file = cli("simulate", job(), "--set", setting), cli("simulate", job("other.toml", **same_as))
    assert by_flag.code == 0 and by_flag.json == by_file.json
    assert by_flag.json["job_digest"] != cli("simulate", job()).json["job_digest"]


def test_nested_set_reaches_tables_of_the_hardware(cli: Any, job: Any) -> None:
    slow = cli("simulate", job(), "--set", "cluster.gemm.grouped_efficiency=0.1").json
    assert slow["iteration_s"] > cli("simulate", job()).json["iteration_s"]
    half = cli("simulate", job(), "--set", "cluster.speed.1=0.5")
    assert half.json == cli("simulate", job(), "--set", "cluster.speed={1=0.5}").json
    assert half.json["iteration_s"] > cli("simulate", job()).json["iteration_s"]


def test_a_later_set_wins(cli: Any, job: Any) -> None:
    twice = cli("simulate", job(), "--set", "parallel.zero=0", "--set", "parallel.zero=2")
    assert twice.json == cli("simulate", job(), "--set", "parallel.zero=2").json


def test_costs_are_not_in_the_plan_digest(cli: Any, job: Any) -> None:
    a = cli("simulate", job()).json
    b = cli("simulate", job(), "--set", "cluster.gpu=a100-sxm-80gb").json
    assert a["plan_digest"] == b["plan_digest"] and a["cost_digest"] != b["cost_digest"]


def test_the_digests_do_not_know_where_the_file_lies(cli: Any, job: Any) -> None:
    assert cli("simulate", job("a.toml")).json == cli("simulate", job("b.toml")).json


def test_stage_times_replace_the_model_s_costs(cli: Any, job: Any) -> None:
    times = "costs.stage_times={ F = 1.0, I = 1.0, W = 1.0, p2p = 0.0 }"
    found = cli("simulate", job(parallel={"dp": 1, "ep": 1}), "--set", times).json
    # 4 + 2 - 1 rounds of 3 s, less what a stage's last W leaves open behind its send.
    assert 14 < found["iteration_s"] <= 15.01


def test_configs_are_found_beside_the_job(cli: Any, job: Any, tmp_path: Path) -> None:
    from ir.workload.config import load as model

    (tmp_path / "config.json").write_text((model._PRESETS / "tiny-moe.json").read_text())
    for name in ("config.json", "./config.json", str(tmp_path), str(tmp_path / "config.json")):
        found = cli("simulate", job(model={"config": name}))
        assert found.code == 0 and found.json["plan_digest"] == cli("simulate", job()).json["plan_digest"]

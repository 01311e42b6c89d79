"""Selective recompute, executed: unfused attention whose scores backward makes again."""

import pytest

from tests.executor.runs import alone, error, run

GIVEN = ("model.attention=unfused", "model.seq_len=128")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_scores_made_again_train_as_stored_ones_do_in_less_memory(schedule: str) -> None:
    sets = (*GIVEN, f"schedule.name={schedule}")
    one = alone(*sets)
    stored, again = (run(*sets, f"schedule.recompute={how}", memory=True) for how in ("none", "selective"))
    assert error(stored, one) <= 1e-10 and error(again, one) <= 1e-10
    peaks = [ran.object["memory"]["peak_allocated_bytes"]["0"] for ran in (stored, again)]
    assert peaks[1] < 0.9 * peaks[0], "what only one of them keeps grows with the square of the 128 tokens"


def test_memory_falls_with_the_layers_made_again() -> None:
    sets = ("model.seq_len=64", "schedule.name=gpipe", "schedule.recompute=full", "model.num_hidden_layers=4")
    some = ("0", "1::2", ":3", ":")
    ran = [run(*sets, f"schedule.recompute_layers={x}", memory=True).object for x in some]
    peaks = [max(x["memory"]["peak_allocated_bytes"].values()) for x in ran]
    assert peaks == sorted(set(peaks), reverse=True)
    assert all(x["grad_norms"] == ran[0]["grad_norms"] for x in ran)


def test_flash_attention_has_nothing_to_make_again() -> None:
    sets = ("model.seq_len=64", "schedule.name=1f1b")
    plain, selective = (run(*sets, f"schedule.recompute={how}", memory=True).object for how in ("none", "selective"))
    for key in ("losses", "grad_norms"):
        assert plain[key] == selective[key]
    assert plain["memory"]["peak_allocated_bytes"] == selective["memory"]["peak_allocated_bytes"]

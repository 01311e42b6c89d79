"""A dataset that Hugging Face's library has saved is read as a file of the same tokens is."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from executor.data.dataset import IGNORED, ChunkedTokens
from executor.data.files import check_vocabulary, digest_of_tokens, labels_of, map_tokens
from executor.data.tokens import FileTokens
from executor.modules.base import TokenLoss
from ir.core.errors import ErrorKind, PiperError
from tests.executor.frontend.class_runs import LENGTH, MBS, STEPS, ClassPlan, run_class, sets_of
from tests.executor.frontend.models import hub_classes
from tests.executor.modules.hub import quiet
from tests.executor.runs import distance, run

datasets.disable_progress_bars()
ROWS = [np.random.default_rng(k).integers(0, 128, size=n).tolist() for k, n in enumerate((7, 0, 130, 1, 64, 300))]
FLAT = np.concatenate([np.array(row, dtype=np.int64) for row in ROWS])


def saved(folder: Path, rows: Any = ROWS, column: str = "input_ids", shards: int = 3) -> Path:
    datasets.Dataset.from_dict({column: rows}).save_to_disk(str(folder), num_shards=shards)
    return folder


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(-12, 12), st.integers(-12, 12))
def test_slices_are_those_of_one_array(sizes: list[int], start: int, stop: int) -> None:
    whole = np.arange(sum(sizes))
    tokens = ChunkedTokens.of(np.split(whole, np.cumsum(sizes)[:-1]) if sizes else [])
    assert len(tokens) == len(whole)
    assert (
        tokens[start:stop].tolist() == whole[start:stop].tolist() and tokens[start:].tolist() == whole[start:].tolist()
    )


def test_rows_stand_behind_one_another_and_are_mapped(tmp_path: Path) -> None:
    tokens = map_tokens(str(saved(tmp_path / "set")), 128)
    assert isinstance(tokens, ChunkedTokens) and len(tokens.parts) == 3  # a row of none is in none
    assert tokens[:].tolist() == FLAT.tolist()
    assert not any(part.flags.owndata or part.flags.writeable for part in tokens.parts)
    assert digest_of_tokens(tokens) == digest_of_tokens(FLAT) and IGNORED == TokenLoss.IGNORE
    chosen = datasets.Dataset.from_dict({"input_ids": ROWS}).select([2, 4])  # by indices, which saving resolves
    chosen.save_to_disk(str(tmp_path / "chosen"))
    assert map_tokens(str(tmp_path / "chosen"), 128)[:].tolist() == [*ROWS[2], *ROWS[4]]


def test_windows_and_training_are_those_of_a_file_of_the_same_tokens(tmp_path: Path) -> None:
    folder, file = saved(tmp_path / "set"), tmp_path / "tokens.npy"
    np.save(file, FLAT)
    a, b = (FileTokens(str(path), 128, seed=3, sequences=4) for path in (folder, file))
    for step in range(20):
        assert [a.sequence(step, k, 32).tolist() for k in range(4)] == [
            b.sequence(step, k, 32).tolist() for k in range(4)
        ]
        assert a.missing(step, 32) == b.missing(step, 32)
    ran = [run(f"data.source={path}", "model.vocab_size=128").object["losses"] for path in (folder, file)]
    assert ran[0] == ran[1] != run("model.vocab_size=128").object["losses"]


def test_what_is_no_dataset_of_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    both = {"train": datasets.Dataset.from_dict({"input_ids": ROWS}), "test": datasets.Dataset.from_dict({"x": [1]})}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "splits"))
    broken = saved(tmp_path / "broken") / "dataset_info.json"
    broken.write_text("3")
    cases = [
        (broken.parent, "no saved dataset"),
        (tmp_path / "empty", "no saved dataset"),
        (tmp_path / "splits", "several splits"),
        (saved(tmp_path / "other", column="tokens"), "without the column input_ids: tokens"),
        (saved(tmp_path / "floats", [[0.5, 1.0], [2.0, 1.0]], shards=1), "column input_ids is list<.*double"),
        (saved(tmp_path / "words", [["a", "b"]], shards=1), "column input_ids is list<.*string"),
        (saved(tmp_path / "holes", [[1, None, 3]], shards=1), "or has holes"),
        (saved(tmp_path / "flat", [1, 2, 3], shards=1), "column input_ids is int"),
    ]
    for path, words in cases:
        with pytest.raises(PiperError, match=words) as told:
            map_tokens(str(path), 128)
        assert told.value.key == "data.source" and told.value.allowed
    with pytest.raises(PiperError, match="is outside the vocabulary of 100"):
        run(f"data.source={saved(tmp_path / 'set')}", "model.vocab_size=100")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PiperError, match="needs datasets") as told:
        map_tokens(str(tmp_path / "set"), 128)
    assert told.value.kind is ErrorKind.MISSING_DEPENDENCY


def _set(folder: Path, **columns: Any) -> Path:
    datasets.Dataset.from_dict({"input_ids": ROWS, **columns}).save_to_disk(str(folder), num_shards=3)
    return folder


ONES = [[1] * len(row) for row in ROWS]
HIDDEN = [[IGNORED if k % 3 == 1 else 127 - t for k, t in enumerate(row)] for row in ROWS]
MASK = [[t % 2 for t in row] for row in ROWS]
COLUMNS = {
    "copies": {"labels": ROWS},
    "hidden": {"labels": HIDDEN},
    "prompt": {"completion_mask": MASK},
    "bools": {"assistant_masks": [[bool(m) for m in row] for row in MASK], "attention_mask": ONES},
    "both": {"labels": HIDDEN, "completion_mask": MASK},
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("length", [1, 5, 32, 600])
def test_labels_are_those_that_a_loop_over_rows_and_tokens_finds(name: str, length: int, tmp_path: Path) -> None:
    columns, found = COLUMNS[name], []
    for r, row in enumerate(ROWS):
        for k, token in enumerate(row):
            label = columns["labels"][r][k] if "labels" in columns else token
            masks = [columns[m][r][k] for m in ("completion_mask", "assistant_masks") if m in columns]
            found.append(label if k and all(masks) else IGNORED)
    source = FileTokens(str(_set(tmp_path / "set", **columns)), 128, sequences=3)
    windows = -(-(len(FLAT) - 1) // length)
    read = [source.sequence(k // 3, k % 3, length) for k in range(windows)]
    starts = [source._window(k // 3, k % 3, length) * length for k in range(windows)]
    assert sorted(starts) == list(range(0, windows * length, length))
    for start, (ids, labels) in zip(starts, read, strict=True):
        want = found[start + 1 : start + 1 + length]
        assert labels.tolist() == want + [IGNORED] * (length - len(want))
        assert ids[: len(want)].tolist() == FLAT[start : start + len(want)].tolist()
    for step in range(windows // 3):
        assert source.missing(step, length) == sum(int((x[1] == IGNORED).sum()) for x in read[3 * step : 3 * step + 3])


def test_masks_of_ones_say_nothing_and_what_marks_tokens_otherwise_is_not_silently_left_out(tmp_path: Path) -> None:
    for name in ("attention_mask", "loss_mask"):
        tokens = map_tokens(str(_set(tmp_path / name, **{name: ONES})), 128)
        assert tokens[:].tolist() == FLAT.tolist() and labels_of(tokens) is None
    floats = _set(tmp_path / "ones", loss_mask=[[1.0] * len(row) for row in ROWS])
    assert labels_of(map_tokens(str(floats), 128)) is None
    loud: dict[str, tuple[str, Any, str]] = {
        "floats": ("loss_mask", [[*map(float, row[1:]), 0.0] for row in ONES], r"marks some tokens \(0\)"),
        "halves": ("loss_mask", [[0.5]] * len(ROWS), r"weighs some tokens less than others \(0.5\)"),
        "nested": ("attention_mask", [[[1, 0]]] * len(ROWS), r"marks some tokens \(0\)"),
        "unread": ("attention_mask", [["no"]] * len(ROWS), "is no list of numbers"),
        "none": ("loss_mask", [[1, None]] * len(ROWS), "is no list of numbers, or has holes"),
        "padded": ("attention_mask", [[*row[1:], 0] for row in ONES], r"attention_mask marks some tokens \(0\)"),
        "megatron": ("loss_mask", MASK, r"loss_mask marks some tokens \(0\)"),
        "fewer": ("labels", [[5, 6]] * len(ROWS), "row 0 has 7 of input_ids and 2 of labels"),
        "words": ("labels", [["a"] * len(row) for row in ROWS], r"column labels is .*string"),
        "parts": ("completion_mask", [[0.5] * len(row) for row in ROWS], r"column completion_mask is .*double"),
        "holes": ("labels", [[None] * len(row) for row in ROWS], "column labels is .*, or has holes"),
        "scalar": ("labels", list(range(len(ROWS))), "column labels is int"),
    }
    for name, (column, rows, words) in loud.items():
        with pytest.raises(PiperError, match=words):
            map_tokens(str(_set(tmp_path / name, **{column: rows})), 128)
    for label in (-1, 128):
        path = str(_set(tmp_path / f"label {label}", labels=[[label] * len(row) for row in ROWS]))
        with pytest.raises(PiperError, match=f"label {label} is outside the vocabulary of 128"):
            check_vocabulary(map_tokens(path, 128), path, 128)
        with pytest.raises(PiperError, match=f"label {label} is outside the vocabulary of 128"):
            FileTokens(path, 128).sequence(0, 0, 32)


def test_other_labels_are_other_data_to_a_checkpoint(tmp_path: Path) -> None:
    tables = {"none": {}, **{name: COLUMNS[name] for name in ("copies", "hidden", "prompt", "both")}}
    sets = [_set(tmp_path / name, **columns) for name, columns in tables.items()]
    digests = [digest_of_tokens(map_tokens(str(path), 128)) for path in sets]
    assert len(set(digests)) == len(digests) and digests[0] == digest_of_tokens(FLAT)


@pytest.mark.parametrize("plan", [(2, 2, 1, "1f1b"), (2, 1, 0, "dualpipe")], ids=str)
def test_rows_of_seq_len_train_as_transformers_trains_them(plan: ClassPlan, tmp_path: Path) -> None:
    """Its own loss of (input_ids, labels), a mean over what counts of all rows: a step of all is an epoch."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, hub_classes.VOCAB, size=(MBS, LENGTH))
    labels = np.where(rng.random(ids.shape) < 0.4, IGNORED, rng.integers(0, hub_classes.VOCAB, size=ids.shape))
    rows = datasets.Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})
    rows.save_to_disk(str(tmp_path / "set"))
    found, _, params = run_class("llama", *sets_of(plan, "none"), f"data.source={tmp_path / 'set'}")
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = hub_classes.llama().to(torch.float64)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        made = model(input_ids=torch.from_numpy(ids), labels=torch.from_numpy(labels), use_cache=False)
        loss = F.cross_entropy(made.logits[:, :-1].flatten(0, 1), torch.from_numpy(labels[:, 1:]).flatten())
        assert made.loss.item() == pytest.approx(loss.item(), rel=1e-6)  # theirs, which is of float32
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert np.abs(np.array(found["losses"]) / losses - 1).max() <= 1e-12
    assert distance(params, {n: p.detach().numpy() for n, p in model.named_parameters()}) <= 1e-10
    blind, _, _ = run_class("llama", *sets_of(plan, "none"), f"data.source={_bare(rows, tmp_path)}")
    assert abs(blind["losses"][0] / losses[0] - 1) > 1e-3


def test_ranks_that_are_threads_may_read_one_dataset_at_once(tmp_path: Path) -> None:
    """The library's bars of progress are made and unmade by each reader: unlocked, some 2 of 600 fail."""
    path, before = str(saved(tmp_path / "set")), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            read = list(pool.map(lambda _: len(map_tokens(path, 128)), range(80)))
    finally:
        sys.setswitchinterval(before)
    assert read == [len(FLAT)] * 80


def _bare(rows: Any, folder: Path) -> Path:
    rows.remove_columns("labels").save_to_disk(str(folder / "bare"))
    return folder / "bare"

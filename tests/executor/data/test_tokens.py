"""Files of tokens: one order under every plan and format, nothing read that is not asked for, bad files by name."""

import struct
from collections import Counter
from contextlib import nullcontext
from math import factorial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.data.files import check_vocabulary
from executor.data.tokens import FileTokens, TokenOrder
from executor.runtime.batch import MicrobatchLoader
from ir.core.errors import PiperError

TOKENS = np.arange(32, 32 + 22)
MEGATRON = {np.dtype("u1"): 1, np.dtype("<i4"): 4, np.dtype("<i8"): 5, np.dtype("<u2"): 8}


def _index(
    lengths: list[int], kind: str, *, code: int | None = None, version: int = 1, starts: list[int] | None = None
) -> bytes:
    """An index as Megatron-LM's IndexedDatasetBuilder writes it. starts: if not behind one another."""
    each, starts = np.dtype(kind), np.array(starts or np.cumsum([0, *lengths])[:-1])
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", version) + struct.pack("<B", code or MEGATRON[each])
    head += struct.pack("<QQ", len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    return head + np.array(lengths, np.int32).tobytes() + (starts * each.itemsize).tobytes() + documents.tobytes()


def _write(folder: Path, form: str, tokens: np.ndarray = TOKENS) -> Path:
    suffix, _, kind = form.partition(" ")
    path = folder / f"data{suffix}"
    if suffix == ".npy":
        np.save(path, tokens.astype(kind))
        return path
    path.write_bytes(tokens.astype(kind).tobytes())
    if suffix == ".bin" and kind != "<u2":
        path.with_suffix(".idx").write_bytes(_index([10, 3, len(tokens) - 13], kind))
    return path


FORMS = [".txt u1", ".npy <i8", ".npy <u2", ".bin <u2", ".bin <i4", ".bin <i8", ".uint16 <u2", ".uint32 <u4"]


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_each_token_once_an_epoch_in_one_order(form: str, tmp_path: Path) -> None:
    data = MicrobatchLoader(str(_write(tmp_path, form)), vocab=128, length=4, microbatches=6)
    assert data.valid_tokens(0) == 21 == data.valid_tokens(1)  # 5 windows of 4, one of 1
    rows = [data.batch(step, 0, m) for step in (0, 1) for m in range(6)]
    labels = [torch.cat([b.labels for b in rows[k : k + 6]]).flatten() for k in (0, 6)]
    assert all(sorted(x[x >= 0].tolist()) == list(range(33, 54)) for x in labels)
    assert not torch.equal(*labels)
    other = MicrobatchLoader(str(_write(tmp_path, FORMS[0])), vocab=128, length=4, replicas=3, microbatches=2)
    assert all(torch.equal(other.batch(k // 6, k % 6 // 2, k % 2).ids, b.ids) for k, b in enumerate(rows))


@given(count=st.integers(1, 600), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 2**40))
def test_an_order_is_a_permutation_and_its_inverse(count: int, seed: int, epoch: int) -> None:
    order = TokenOrder.of(count, seed, epoch)
    found = [order.window(k) for k in range(count)]
    assert sorted(found) == list(range(count)) and [order.place(w) for w in found] == list(range(count))


@pytest.mark.parametrize("count", [3, 4, 5])
def test_all_permutations_are_drawn_alike(count: int) -> None:
    kinds, draws = factorial(count), 12_000
    orders = (TokenOrder.of(count, 7, epoch) for epoch in range(draws))
    seen = Counter(tuple(o.window(k) for k in range(count)) for o in orders)
    chi2 = sum((seen[p] - draws / kinds) ** 2 for p in seen) / (draws / kinds)
    assert len(seen) == kinds and chi2 < kinds - 1 + 5 * (2 * (kinds - 1)) ** 0.5  # five deviations of a fair draw


@pytest.mark.parametrize("sequences", [1, 4, 6, 7, 40])
def test_labels_that_count_are_known_without_reading(sequences: int, tmp_path: Path) -> None:
    source = FileTokens(str(_write(tmp_path, ".npy <i8")), 128, 3, sequences)
    for step in range(9):
        rows = [source.sequence(step, k, 4) for k in range(sequences)]
        assert source.missing(step, 4) == sum(int((r[1] < 0).sum()) for r in rows)


class _Watched:
    """A billion tokens that nobody has; which of them were read."""

    dtype = np.dtype("<u2")

    def __init__(self) -> None:
        self.read: list[range] = []

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, at: slice) -> np.ndarray:
        self.read.append(range(len(self))[at])
        return np.ones(len(self.read[-1]), self.dtype)


def test_a_rank_reads_its_own_windows_of_a_billion_tokens(tmp_path: Path) -> None:
    data = MicrobatchLoader(
        str(_write(tmp_path, ".bin <u2")), vocab=128, length=1024, replicas=8, microbatches=4, size=2
    )
    assert isinstance(data.source, FileTokens)
    tokens = _Watched()
    data.source.tokens = tokens  # type: ignore[assignment]
    for step in (0, 10**5):
        data.batch(step, 3, 1)
    assert len({r.start for r in tokens.read}) == 4 and all(len(r) <= 1025 for r in tokens.read)
    check_vocabulary(np.broadcast_to(np.uint16(5), 10**9), "x.txt", 128)  # nor does looking at it all of it


def _bad(path: Path, name: str) -> Path:
    """A file with one thing wrong."""
    lengths, kind = [10, 12], "<i4"
    target = path / "data.bin"
    target.write_bytes(TOKENS.astype(kind).tobytes())
    index = {
        "magic": b"NOTMIDX\x00\x00" + _index(lengths, kind)[9:],
        "cut off": _index(lengths, kind)[:-1],
        "head cut off": _index(lengths, kind)[:20],
        "version": _index(lengths, kind, version=2),
        "floats": _index(lengths, kind, code=7),
        "of another file": _index([10, 13], kind),
        "empty": _index([], kind),
        "pictures": _index(lengths, kind) + b"\0\1",
        "a selection": _index([4, 12], kind, starts=[0, 10]),
        "another order": _index([12, 5, 5], kind, starts=[5, 0, 17]),
        "a negative length": _index([10, -2, 14], kind),
    }
    if name in index:
        target.with_suffix(".idx").write_bytes(index[name])
        return target
    bare = path / "flat.bin"
    match name:
        case "odd":
            bare.write_bytes(b"abc")
        case "uint32 as uint16":
            bare.write_bytes(TOKENS.astype("<u4").tobytes())
        case "floats in numpy":
            np.save(bare := path / "x.npy", np.ones(4))
        case "a table":
            np.save(bare := path / "x.npy", np.ones((2, 2), int))
        case "objects":
            np.save(bare := path / "x.npy", np.array([{}] * 3), allow_pickle=True)
        case "no numpy":
            (bare := path / "x.npy").write_bytes(b"hello, world")
        case "nothing in it":
            bare.write_bytes(b"")
        case "negative":
            np.save(bare := path / "x.npy", np.array([1, -1, 2]))
        case "word":
            (bare := path / "x.txt").write_text("hello")
        case "zip":
            (bare := path / "x.pt").write_bytes(b"PK\x03\x04 and so on")
        case "gzip":
            (bare := path / "x.txt.gz").write_bytes(b"\x1f\x8b\x08 and so on")
        case "Parquet":
            (bare := path / "x.parquet").write_bytes(b"PAR1 and so on")
        case "index":
            (bare := path / "x.idx").write_bytes(_index([2], kind))
    return bare


WRONG = {
    "magic": "no index of Megatron's", "cut off": "81 bytes", "head cut off": "no index", "version": "version 2",
    "floats": "number format 7", "of another file": "ends at byte 92 of a file of 88", "empty": "0 sequences",
    "pictures": "have a mode", "a selection": "sequence 1 is 12 tokens from byte 40 on",
    "another order": "sequence 0 is 12 tokens from byte 20 on", "a negative length": "sequence 1 is -2 tokens",
    "odd": "1 bytes are left over", "uint32 as uint16": "name it .uint32", "floats in numpy": "4 elements of float64",
    "a table": "2 dimensions", "objects": "cannot read tokens", "no numpy": "cannot read tokens",
    "nothing in it": "cannot read tokens", "negative": "token -1 is outside", "missing": "cannot read tokens",
    "word": "token 111 is outside the vocabulary of 100", "index": "an index, not its tokens",
    "zip": "no text, but a zip file", "gzip": "compressed by gzip", "Parquet": "a Parquet file",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    path = _bad(tmp_path, name)
    with pytest.raises(PiperError) as info:
        source = FileTokens(str(path), 100)
        check_vocabulary(source.tokens, str(path), 100)
    assert WRONG[name] in str(info.value) and info.value.key == "data.source" and str(path)[:-4] in str(info.value)


def test_uint32_is_seen_where_the_vocabulary_is_all_of_uint16_and_modes_of_text_pass(tmp_path: Path) -> None:
    flat = tmp_path / "flat.bin"
    for kind, said in (("<u4", "name it .uint32"), ("<u2", "")):
        flat.write_bytes(TOKENS.astype(kind).tobytes())
        with pytest.raises(PiperError, match=said) if said else nullcontext():
            check_vocabulary(FileTokens(str(flat), 2**16).tokens, str(flat), 2**16)
    path = _write(tmp_path, ".bin <i4")
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes() + bytes(3))
    assert FileTokens(str(path), 128).tokens[:].tolist() == TOKENS.tolist()


def test_a_token_that_no_sample_met_is_refused_where_it_is_read(tmp_path: Path) -> None:
    tokens = np.zeros(10**7, dtype="<u4")
    tokens[70_000] = 100
    path = _write(tmp_path, ".uint32 <u4", tokens)
    source = FileTokens(str(path), 100)
    check_vocabulary(source.tokens, str(path), 100)
    with pytest.raises(PiperError, match="token 100 is outside"):
        for k in range(10**7 // 10**5):
            source.sequence(0, k, 10**5)

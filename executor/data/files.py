"""Files of tokens, mapped: text, `.npy`, flat uint16 and uint32, Megatron's `.bin` with its `.idx`; saved datasets."""

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError

import numpy as np

from executor.data.dataset import IGNORED, ChunkedTokens, TrainedTokens, saved_dataset
from ir.core.errors import ErrorKind, PiperError
from ir.core.files import FileErrors, check_regular

FIX = "synthetic, or a path that starts at the job's folder"
FORM = FileErrors("tokens", ErrorKind.JOB, "data.source", 2**50, FIX)
FLAT = {".uint16": "<u2", ".uint32": "<u4"}
KINDS = "text, .npy, .bin beside its .idx, flat numbers: .uint16, .uint32, .bin; or the folder of a saved dataset"
_MAGIC, _HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")
_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # Megatron's codes of integer formats
_PACKED = {  # first bytes of files that are no text, and would be read as one
    b"PK\x03\x04": "a zip file (.npz, .pt)",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xfd7zXZ\x00": "compressed by xz",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "an array of NumPy's, not named .npy",
    _MAGIC: "an index, not named .idx",
}
_SEQUENCES = 2**20  # of an index, looked at at once
_BROKEN = (TypeError, LookupError, SyntaxError, TokenError, EOFError, OverflowError, MemoryError, RecursionError)
_BLOCKS, _BLOCK = 64, 2**16  # looked at before a run, evenly spread; what a rank reads is looked at as it reads it

Tokens = np.ndarray | ChunkedTokens


def map_tokens(path: str, vocab: int, form: FileErrors = FORM) -> Tokens:
    """A file's tokens in their order, mapped: a page is read when somebody reads a token on it.

    A `.bin` without an `.idx` holds uint16 where the vocabulary goes in it, else uint32. Raises PiperError.
    """
    file = Path(path)
    tokens: Tokens = saved_dataset(file, form) if file.is_dir() else _file(file, vocab, form)
    if tokens.ndim != 1 or len(tokens) < 2 or tokens.dtype.kind not in "ui":
        found = f"{tokens.ndim} dimensions, {tokens.size} elements of {tokens.dtype}"
        raise form.wrong(f"not a row of tokens: {found}", path, None, "≥ 2 integers in one dimension")
    return tokens


def _file(file: Path, vocab: int, form: FileErrors) -> np.ndarray:
    check_regular(file, form)
    try:
        return _mapped(file, vocab, form)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PiperError(
            ErrorKind.IO, f"cannot read tokens: {why}", file=str(file), key=form.key, allowed=KINDS, suggestion=form.fix
        ) from error


def _mapped(file: Path, vocab: int, form: FileErrors) -> np.ndarray:
    index = file.with_suffix(".idx")
    if file.suffix == ".npy":
        return _npy(file)
    if file.suffix == ".idx":
        raise form.wrong("an index, not its tokens", str(file), None, KINDS, str(file.with_suffix(".bin")))
    if file.suffix == ".bin" and index.exists():
        return np.memmap(file, dtype=_indexed(file, index, form), mode="r")
    if file.suffix not in (".bin", *FLAT):
        with file.open("rb") as f:
            head = f.read(16)
        if packed := next((said for magic, said in _PACKED.items() if head.startswith(magic)), None):
            raise form.wrong(f"no text, but {packed}", str(file), None, KINDS)
    kind = FLAT.get(file.suffix) or (("<u2" if vocab <= 2**16 else "<u4") if file.suffix == ".bin" else "u1")
    if size := file.stat().st_size % (each := np.dtype(kind).itemsize):
        message = f"{size} bytes are left over behind numbers of {each} bytes"
        raise form.wrong(message, str(file), None, KINDS)
    return np.memmap(file, dtype=kind, mode="r")


def _npy(file: Path) -> np.ndarray:
    """NumPy's own file, mapped. Raises ValueError: it is none; its reader raises anything that Python's parser does."""
    try:
        return np.lib.format.open_memmap(file, mode="r")
    except _BROKEN as error:
        raise ValueError(f"no array of NumPy's: {error}") from error


def _indexed(file: Path, index: Path, form: FileErrors) -> str:
    """The format of a `.bin`, as its `.idx` says it: header, lengths (int32), places in bytes (int64), documents."""
    check_regular(index, form)
    with index.open("rb") as f:
        head = f.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise form.wrong("no index of Megatron's", str(index), None, f"a file that begins {_MAGIC!r}")
        _, version, code, count, documents = _HEADER.unpack(head)
        if version != 1 or code not in _CODES:
            message = f"version {version}, number format {code}"
            raise form.wrong(message, str(index), None, f"version 1, an integer format: {sorted(_CODES)}")
        size, least = index.stat().st_size, _HEADER.size + 12 * count + 8 * documents
        if not count or size not in (least, least + count):  # with modes, one byte each
            message = f"{size} bytes, {least} are needed for {count} sequences and {documents} documents"
            raise form.wrong(message, str(index), None, "an index that is whole")
    if (end := _end(index, count, np.dtype(_CODES[code]).itemsize, form)) != (held := file.stat().st_size):
        message = f"the index ends at byte {end} of a file of {held}"
        raise form.wrong(message, str(file), None, f"the tokens that {index.name} was written with")
    if size > least and np.memmap(index, dtype="i1", mode="r", offset=least).any():
        raise form.wrong("some sequences have a mode: they are no text", str(index), None, "sequences of mode 0")
    return _CODES[code]


def _end(index: Path, count: int, each: int, form: FileErrors) -> int:
    """The byte at which an index's last sequence ends. each: bytes of a token.

    Raises PiperError (job): a sequence begins elsewhere than the one before it ends. The file is read from end to end,
    and such an index means others of its tokens (a selection), or another order.
    """
    lengths = np.memmap(index, dtype="<i4", mode="r", offset=_HEADER.size, shape=count)
    begins, end = np.memmap(index, dtype="<i8", mode="r", offset=_HEADER.size + 4 * count, shape=count), 0
    for first in range(0, count, _SEQUENCES):
        sizes = lengths[first : first + _SEQUENCES].astype(np.int64) * each
        wanted = end + np.cumsum(sizes) - sizes
        if (odd := np.flatnonzero((begins[first : first + _SEQUENCES] != wanted) | (sizes < 0))).size:
            k = int(odd[0])
            message = f"sequence {first + k} is {lengths[first + k]} tokens from byte {begins[first + k]} on"
            allowed = f"sequences behind one another: this one from byte {wanted[k]} on"
            raise form.wrong(message, str(index), None, allowed, "write its tokens anew, in the index's order")
        end = int(wanted[-1] + sizes[-1])
    return end


def check_vocabulary(tokens: Tokens, path: str, vocab: int, form: FileErrors = FORM) -> None:
    """Look at tokens all over a file, at all of a small one. Raises PiperError (job): one is outside the vocabulary."""
    labels = labels_of(tokens)
    halves = Path(path).suffix == ".bin" and tokens.dtype == np.uint16 and len(tokens) % 2 == 0
    if not halves and labels is None and tokens.dtype.kind == "u" and vocab > np.iinfo(tokens.dtype).max:
        return
    for start, part in _sample(tokens, _BLOCK):
        refuse_outside(part, path, vocab, form)
        if labels is not None:
            refuse_outside_labels(labels.of(part, start), path, vocab, form)
        halves = halves and not part[1::2].any()
    if halves and not Path(path).with_suffix(".idx").exists():
        message, fix = "every other number is 0: these are uint32, read as uint16", "name it .uint32"
        raise form.wrong(message, path, None, KINDS, fix)


def refuse_outside(part: np.ndarray, path: str, vocab: int, form: FileErrors = FORM, word: str = "token") -> None:
    """Raise PiperError (job) for the first token that no embedding has a row for."""
    for token in (int(part.max()), int(part.min())) if part.size else ():
        if not 0 <= token < vocab:
            fix = f"model.vocab_size={token + 1}" if token > 0 else None
            message = f"{word} {token} is outside the vocabulary of {vocab}"
            raise form.wrong(message, path, None, f"0 to {vocab - 1}", fix)


def refuse_outside_labels(labels: np.ndarray, path: str, vocab: int, form: FileErrors = FORM) -> None:
    """Raise PiperError (job) for the first label that counts, and is no token."""
    refuse_outside(labels[labels != IGNORED], path, vocab, form, "label")


def labels_of(tokens: Tokens) -> TrainedTokens | None:
    """Where columns say what is trained on; None where every token is."""
    return tokens.labels if isinstance(tokens, ChunkedTokens) else None


def digest_of_tokens(tokens: Tokens) -> str:
    """SHA-256 of how many there are and of some all over, with their labels where columns say which: the same for the
    same tokens in another format.

    >>> digest_of_tokens(np.arange(9, dtype="<u2")) == digest_of_tokens(np.arange(9, dtype="<i8"))
    True
    """
    found = hashlib.sha256(str(len(tokens)).encode())
    labels = labels_of(tokens)
    for start, part in _sample(tokens, 256):
        found.update(part.astype("<i8").tobytes())
        if labels is not None:
            found.update(labels.of(part, start).astype("<i8").tobytes())
    return found.hexdigest()


def _sample(tokens: Tokens, block: int) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks at even distances, the first and the last tokens among them, and where they begin; everything where that
    is no more."""
    if len(tokens) <= _BLOCKS * block:
        yield 0, tokens[:]
        return
    for start in np.linspace(0, len(tokens) - block, _BLOCKS).astype(np.int64) // 2 * 2:
        yield int(start), tokens[start : start + block]
    yield len(tokens) - 1, tokens[-1:]

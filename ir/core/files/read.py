"""Where a data file is, and opening it: regular files of bounded size packed and unpacked, UTF-8 text without NUL."""

from __future__ import annotations

import gzip
import os
import stat
import sys
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import BinaryIO

from ir.core.errors import ErrorKind, PiperError

MB = 10**6
_GZIP = b"\x1f\x8b"
_CHUNK = 2**20
_LONGEST = 200  # letters of a key in an error
_RATIO, _SMALL = 100, 64 * MB  # of unpacked to packed bytes, past what any file may have; JSON packs 10 to 30 times
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True)
class FileErrors:
    """A kind of data file, as its readers and errors know it.

    what: how errors call it, with an article. kind: of errors in its content. key: the job's key or the flag that
    names it. most: bytes, unpacked. fix: where such a file comes from. packed: gzip is taken, too.
    smallest, largest: of numbers, signs and zeros aside.
    finite: NaN and infinities are refused here, not where values are typed.
    """

    what: str
    kind: ErrorKind
    key: str
    most: int = 64 * MB
    fix: str | None = None
    packed: bool = False
    smallest: float = 0.0
    largest: float = 1e18
    finite: bool = True

    def named_by(self, key: str) -> FileErrors:
        """The same, named by another key or flag."""
        return replace(self, key=key)

    @contextmanager
    def naming(self, file: str | Path | None) -> Iterator[None]:
        """Fill in file, key and what is allowed where an error of a reader inside does not say it."""
        try:
            yield
        except PiperError as e:
            raise e.at(file=None if file is None else str(file), key=self.key, allowed=self.fix) from None

    def wrong(
        self, message: str, file: str | None, key: str | None, allowed: str | None, fix: str | None = None
    ) -> PiperError:
        """An error in the content of such a file."""
        key = (key or self.key)[:_LONGEST]
        return PiperError(self.kind, message, file=file, key=key, allowed=allowed, suggestion=fix)


def read_bytes(path: str | Path, form: FileErrors) -> bytes:
    """A file's bytes, unpacked. Raises PiperError (io): it cannot be read; (the format's kind): too large."""
    packed = False
    try:
        with _opened(path, form) as f:
            packed = form.packed and f.read(2) == _GZIP
            f.seek(0)
            size = os.fstat(f.fileno()).st_size
            raw = _unpacked(f, form, size, str(path)) if packed else _whole(f, form.most)
    except (OSError, ValueError, EOFError, zlib.error) as e:  # ValueError: a NUL in the path
        why = getattr(e, "strerror", None) or e
        allowed = "a whole .gz file" if packed else "a file that can be read"
        raise _unreadable(form, f"cannot read {form.what}: {why}", path, allowed) from None
    if len(raw) > form.most:
        raise _too_large(form, str(path))
    return raw


def read_text(path: str | Path, form: FileErrors) -> str:
    """A file's text: UTF-8, with or without a byte order mark. Raises PiperError (io, the format's kind)."""
    raw = read_bytes(path, form)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise form.wrong("not UTF-8", str(path), _line(raw, e.start), "UTF-8 text") from None
    if (at := raw.find(0)) >= 0:
        raise form.wrong("a NUL: this is no text", str(path), _line(raw, at), "UTF-8 text")
    return text


def check_regular(path: str | Path, form: FileErrors, first: int = 0) -> bytes:
    """The first bytes of a file, for readers that open it themselves.

    Raises PiperError (io): it is no regular file, or cannot be read; (the format's kind): too large.
    """
    try:
        with _opened(path, form) as f:
            return f.read(first)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise _unreadable(form, f"cannot read {form.what}: {why}", path, "a file that can be read") from None


def cut(value: object, most: int = 60) -> str:
    """A value as errors show it: on one line, and short.

    >>> cut("x" * 100, 8)
    "'xxxxxxx…"
    """
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to write some of them
        return f"a number of {value.bit_length()} bits"
    text = repr(value[: most + 1] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= most else f"{text[:most]}…"


def _opened(path: str | Path, form: FileErrors) -> BinaryIO:
    """The file, open; without waiting for a writer at the other end, should it be a pipe."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    file = os.fdopen(handle, "rb") if stat.S_ISREG((found := os.fstat(handle)).st_mode) else None
    if file is None:
        os.close(handle)
        what = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        raise _unreadable(form, f"cannot read {form.what}: it is {what}", path, "a regular file")
    if found.st_size > form.most:
        file.close()
        raise _too_large(form, str(path))
    return file


def _unpacked(f: BinaryIO, form: FileErrors, size: int, path: str) -> bytes:
    most = min(form.most, max(_SMALL, _RATIO * size))
    with gzip.GzipFile(fileobj=f) as packed:
        out = _whole(packed, most)
    if len(out) > most:
        raise _too_large(form, path, most, f"it unpacks to more than {most // MB} MB from {size} bytes")
    return out


def _whole(f: BinaryIO | gzip.GzipFile, most: int) -> bytes:
    """All of it, or a little more than `most`: one read of so many bytes would take the memory for them at once."""
    out = bytearray()
    while len(out) <= most and (chunk := f.read(_CHUNK)):
        out += chunk
    return bytes(out)


def _unreadable(form: FileErrors, message: str, path: str | Path, allowed: str) -> PiperError:
    return PiperError(ErrorKind.IO, message, file=str(path), key=form.key or None, allowed=allowed, suggestion=form.fix)


def _too_large(form: FileErrors, path: str, most: int | None = None, why: str | None = None) -> PiperError:
    message = f"this is not {form.what}: {why or 'too large'}"
    return form.wrong(message, path, None, f"up to {(most or form.most) // MB} MB")


def _line(raw: bytes, at: int) -> str:
    return f"line {1 + raw[:at].count(10)}"


def named_path(file: str, name: str, presets: Collection[str] = ()) -> str:
    """The path that `name` stands for in a job read from `file`; a preset's name, or a word like one, as it is.

    It starts at the folder of the job's file. Without presets every name is a path.

    >>> named_path("jobs/a.toml", "counts.csv"), named_path("jobs/a.toml", "/data/counts.csv")
    ('jobs/counts.csv', '/data/counts.csv')
    >>> named_path("jobs/a.toml", "h800-sxm", ["h800-sxm"]), named_path("jobs/a.toml", "../my.json", ["h800-sxm"])
    ('h800-sxm', 'jobs/../my.json')
    """
    path = Path(file).parent / name
    if not presets:
        return str(path)
    is_path = name.endswith(".json") or "/" in name or name == "." or (name not in presets and os.path.isdir(path))
    return str(path) if is_path and name not in presets else name


class _AsItStands(SourceFileLoader):
    """Without bytecode, which knows a file by its second and its size: two versions may have both in common."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


_BESIDE: dict[str, set[str]] = {}  # by folder of a file that was run: modules imported from there


def run_file(label: str, path: str | Path) -> ModuleType:
    """Run a file as the module `label`, and what that module then is. It may import what lies beside it, as Python
    imports it, but anew for each run.
    """
    spec = spec_from_loader(label, _AsItStands(label, str(path)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[label] = module  # dataclasses look their module up
    with _siblings(str(Path(path).resolve().parent)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _siblings(folder: str) -> Iterator[None]:
    """Inside, what lies in the folder can be imported, behind all else: it must not stand in for a library. No bytecode
    is left there, which might be taken for that of another version.
    """
    for name in [name for names in _BESIDE.values() for name in names]:
        sys.modules.pop(name, None)
    others = [f for f in sys.path if f not in _BESIDE]
    if folder not in others:
        _BESIDE[folder] = set()
        sys.path[:] = [*others, folder, *(f for f in _BESIDE if f != folder)]
    before, writes = set(sys.modules), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        new = {n: getattr(m, "__file__", None) for n, m in sys.modules.items() if n not in before}
        tops = {n.partition(".")[0] for n, file in new.items() if file and _is_in(folder, n, file)}
        _BESIDE.get(folder, set()).update(n for n in new if n.partition(".")[0] in tops)


def _is_in(folder: str, module: str, file: str) -> bool:
    """Whether a module's file lies there by its name; one of an environment that lies there has more before it."""
    first = Path(file).relative_to(folder).parts[0] if Path(file).is_relative_to(folder) else ""
    return first.removesuffix(".py") == module.partition(".")[0]

"""Files that are nearly right: one or a few mistakes in a valid one, where its structure allows them."""

import gzip
import json
import os
import random
import re
import struct
import tomllib
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from ir.job.table import toml_value

EVIL: list[Any] = [
    None, True, False, "", "x", [], {}, 0, -1, 1, 2, 3, 7, 1.5, 10**9 + 7, 10**21, 10**400, 1e77, -1e300, 1e-300,
    5e-324, 2**31, 2**53 + 1, 2**63, 2**64, float("nan"), float("inf"), -0.0, "8k", "4GiB", "100 GB/s", "fp4", "bf61",
    "NaN", "1", "\0", "\ud800", "\x1b[31m", "[red]", "../../x.json", "/dev/zero", "/", "~", "x" * 5000, "é" * 70,
    "\u202eabc", "١٢", [[]], {"": {}}, [1, "a", None], [0] * 3000, {"a": {"b": [1]}}, "${x}", "$(x)", "*", "a b",
    "a,b", "1e5", "0x1F", "true",
]  # fmt: skip
TOKENS = [
    "nan", "-inf", "1e999", "1_0", "٢", "9" * 5000, "0x1F", "", "\0", "\x1b]0;t\x07", "[bold", "-1", "1e21", ",",
    "\t", "0", "1e-320", '"', "'", "#", "[", "{", "}", "=", "==", "\\", "&a", "*a", "<<: *a",
    "!!python/object:os.system x", "!!binary", "1:30", "0o17", "2001-01-01", "2001-01-01T00:00:00Z", "yes", "~", "|",
    ">", "? x", "${X:-${Y}}", "`x`", "$(x", "$((1/0))", "${A[@]}", "<<E", ";", "&&", "--", "-", "--x=", "true", "'''",
    '"""', "é", "\u202e", "\ufeff", "a" * 300, "2" * 30, "1e308",
]  # fmt: skip
LITTLE = (
    b"\n",
    b" ",
    b'"\n',
    b"[",
    b"(",
    b"{",
    b"a",
    b"0,",
    b'{"a":',
    b"- ",
    b"&a ",
    b"a=1\n",
    b"-a \\\n",
    b"\t",
    b"$a",
)
ODD = (b"\0", b"\xff", b"\x1b[31m", b"\xed\xa0\x80", b'"', b"}", b"[" * 3000, b"\xe9", b"\n" * 3000, b"(" * 200)
HEADERS = (b"'|O8'", b"'<f8'", b"'<i8'", b"(2, 20)", b"-1", b"9" * 30, b"1e9", b"()", b"None", b"'x' * 9", b"(((")
ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "cp500")
UNITS = ("GBps", "Gbps", "GiB", "GB", "MiB", "us", "ms", "TFLOPs", "s", "bytes")


@cache
def _bomb() -> bytes:
    return gzip.compress(b"\0" * 300_000_000, 1)


PLACES: Mapping[str, Callable[[Path], object]] = {
    "nothing": lambda p: None,
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a device": lambda p: p.symlink_to("/dev/zero"),
    "a full device": lambda p: p.symlink_to("/dev/full"),
    "a link to itself": lambda p: p.symlink_to(p.name),
    "a link to nothing": lambda p: p.symlink_to("nothing"),
    "a file of this process": lambda p: p.symlink_to("/proc/self/mem"),
    "a bomb": lambda p: p.write_bytes(_bomb()),
    "a large file": lambda p: (p.touch(), os.truncate(p, 2**28)),
}
READ: Mapping[str, Callable[[str], Any]] = {"json": json.loads, "toml": tomllib.loads}
NUMBERS = (0, 1, 2, 7, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def corrupted(seed: bytes, name: str, rng: random.Random) -> bytes | str:
    """A valid file with mistakes; or a name in PLACES, of what lies there in its place."""
    if rng.random() < 0.005:
        return rng.choice(list(PLACES))
    if rng.random() < 0.0003:
        return _grown(seed, rng)
    times, end = rng.choice((1, 1, 1, 2, 5)), name.rpartition(".")[2]
    tree, data = _tree(seed, end), seed
    if tree is not None and rng.random() < 0.6:
        value = [json.loads(tree)]
        for _ in range(times):
            in_tree(value, rng)
        data = _written(value[0], end, rng)
    else:
        how = rng.random()
        for _ in range(times):
            data = (_in_binary if end in BINARY else _in_lines if how < 0.7 else _in_bytes)(data, rng)
    return gzip.compress(data, 1, mtime=0)[: rng.choice((None, None, 40))] if rng.random() < 0.02 else data


BINARY = ("npy", "idx", "bin", "uint16", "safetensors")


@cache
def _tree(seed: bytes, end: str) -> str | None:
    """A file's tree as JSON, where it has one."""
    if end in READ:
        return json.dumps(READ[end](seed.decode()))
    if end == "yaml":
        import yaml

        return json.dumps(yaml.safe_load(seed))
    return None


def _grown(seed: bytes, rng: random.Random) -> bytes:
    """Half a megabyte of little: what takes time in proportion to its square shows."""
    lines = seed.splitlines(keepends=True) or [b""]
    word = rng.choice((*LITTLE, rng.choice(lines), rng.choice(lines)))
    at = rng.randrange(len(lines))
    return b"".join(lines[:at]) + word * (500_000 // max(1, len(word))) + b"".join(lines[at:])


def _written(value: Any, end: str, rng: random.Random) -> bytes:
    """A tree as text; JSON is YAML, too."""
    if end == "toml" and isinstance(value, dict):
        return _toml(value).encode("utf-8", "surrogatepass")
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.1:  # a key twice
        text = text.replace("{", rng.choice(('{"x": 1, "x": 2, ', '{"": 1, "": 2, ')), 1)
    if rng.random() < 0.05:
        text = text.replace(": 1", ": " + rng.choice(("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 3000)), 1)
    return text.encode("utf-8", "surrogatepass")


def _toml(tree: dict[str, Any]) -> str:
    plain = {k: v for k, v in tree.items() if not isinstance(v, dict)}
    sections = {k: v for k, v in tree.items() if isinstance(v, dict)}
    return _table("", plain) + "".join(_table(f"[{_word(k)}]\n", v) for k, v in sections.items())


def _table(head: str, table: Mapping[str, Any]) -> str:
    return head + "".join(f"{_word(k)} = {_toml_value(v)}\n" for k, v in table.items())


def _word(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key, ensure_ascii=False)


def _toml_value(value: Any) -> str:
    try:
        return toml_value(value)
    except (TypeError, ValueError, AttributeError, RecursionError):
        return json.dumps(value)


def in_tree(value: list[Any], rng: random.Random) -> None:
    """One mistake, anywhere below."""
    at: Any = value
    key: Any = 0
    while isinstance(at[key], dict | list) and at[key] and (at is value or rng.random() > 0.15):
        at = at[key]
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
    match rng.randrange(9):
        case 0 if at is not value:
            at.pop(key)
        case 1 | 2 if isinstance(at, dict):
            at[_other_key(key, rng)] = at.pop(key)
        case 3:
            deep: Any = 0
            for _ in range(rng.choice((20, 70, 120))):
                deep = {"x": deep} if rng.random() < 0.3 else [deep]
            at[key] = deep
        case 4 if at is not value:  # another's value
            at[key] = json.loads(
                json.dumps(at[rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))])
            )
        case 5 if isinstance(at[key], int | float) and not isinstance(at[key], bool):
            at[key] = rng.choice((at[key] * 1000, -at[key], at[key] // 7, at[key] + 1, str(at[key]), [at[key]], 10**9))
        case 6 if isinstance(at[key], str):
            at[key] = _typo(at[key], rng)
        case 7 if isinstance(at, list):
            at.insert(key, deepcopy(rng.choice(EVIL)))
        case _:
            at[key] = deepcopy(rng.choice(EVIL))


def _other_key(key: str, rng: random.Random) -> str:
    stem, _, unit = key.rpartition("_")
    if stem and unit in UNITS and rng.random() < 0.5:
        return f"{stem}_{rng.choice(UNITS)}"
    more = (key.upper(), key + "\x1b[2J", "base", "software", "", key * 50, f"{key}.{key}", key.replace("_", "-"), "é")
    return _typo(key, rng) if rng.random() < 0.6 else rng.choice(more)


def _typo(word: str, rng: random.Random) -> str:
    """One letter less, more, other, or swapped with the next."""
    at, letter = rng.randrange(len(word) + 1), rng.choice("aeintr_s12 .")
    middle = rng.choice(("", letter, letter + word[at : at + 1], word[at : at + 2][::-1]))
    return word[:at] + middle + word[at + (2 if len(middle) == 2 and middle[0] != letter else 1) :]


def _in_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    i = rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            lines.pop(i)
        case 1:
            lines.insert(i, lines[rng.randrange(len(lines))])
        case 2:
            lines[i] = lines[i][: rng.randrange(len(lines[i]) + 1)]
        case 3 if len(data) < 10**4 and rng.random() < 0.1:
            lines[i : i + 1] = [lines[i]] * 500
        case _:
            for mark in rng.sample([b"=", b",", b"\t", b" ", b":"], 5):
                if mark in lines[i]:
                    cells = lines[i].split(mark)
                    token = rng.choice(TOKENS) if rng.random() < 0.7 else json.dumps(rng.choice(EVIL))
                    cells[rng.randrange(len(cells))] = token.encode("utf-8", "surrogatepass")
                    lines[i] = mark.join(cells)
                    break
    return b"\n".join(lines)


def _in_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.choice(ODD) + data[at:]
        case 2:
            return b"\xef\xbb\xbf" + data
        case 3:
            return data.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\x0b", b" ")))
        case 4:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 5:
            return data.decode("utf-8", "replace").encode(rng.choice(ENCODINGS), "replace")
        case 6:
            return data * rng.choice((0, 2, 20)) if len(data) < 10**4 else b""
        case _:
            return data[at:] + data[:at]


def _in_binary(data: bytes, rng: random.Random) -> bytes:
    """A number of some width, a word of the header, or any byte."""
    if rng.random() < 0.4 and len(data) > 8:
        size = rng.choice((1, 2, 4, 8))
        at = rng.randrange(0, min(len(data), 128) - 7) // size * size + rng.choice((0, 0, 1))
        number = rng.choice(NUMBERS) % 2 ** (8 * size)
        return data[:at] + number.to_bytes(size, "little") + data[at + size :]
    start = data.find(b"{", 0, 32)
    end = data.find(b"\n", start) if data.startswith(b"\x93NUMPY") else 8 + int.from_bytes(data[:8], "little")
    if start < 0 or rng.random() < 0.3:
        return _in_bytes(data, rng)
    head = data[start:end]
    if start == 8 and end <= len(data) and (tree := _json(head)):  # safetensors: its length, JSON, tensors
        in_tree(tree, rng)
        head = json.dumps(tree[0]).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(head)) + head + data[end:]
    words = [m.span() for m in re.finditer(rb"'[^']*'|\d+|True|False|[(){},:]", head)]
    if not words:
        return _in_bytes(data, rng)
    a, b = rng.choice(words)
    token = rng.choice(HEADERS)
    return data[:start] + (head[:a] + token + head[b:])[: len(head)].ljust(len(head)) + data[end:]


def _json(head: bytes) -> list[Any]:
    try:
        return [json.loads(head)]
    except (ValueError, RecursionError):
        return []

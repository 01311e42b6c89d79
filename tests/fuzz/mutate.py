"""Files that are nearly right: one or a few mistakes in a valid one, where its structure allows them."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

EVIL: list[Any] = [
    None, True, "", "x", [], {}, 0, -1, 1.5, 10**9 + 7, 10**21, 10**400, 1e77, -1e300, 1e-300, 2**63, "8k", "NaN",
    "\0", "\ud800", "\x1b[31m", "[red]", "../../x.json", "/dev/zero", "x" * 5000, [[]], {"": {}}, [1, "a", None],
]  # fmt: skip
TOKENS = [
    "nan",
    "-inf",
    "1e999",
    "1_0",
    "٢",
    "9" * 5000,
    "0x1F",
    "",
    "\0",
    "\x1b]0;t\x07",
    "[bold",
    "-1",
    "1e21",
    ",",
    "\t",
]


def mutated(seed: bytes, rng: random.Random) -> bytes:
    """A valid file with mistakes."""
    how = rng.random()
    data = seed
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if how < 0.5 and data[:1] in b"[{" and data[:2] != b"[m":
            data = _in_json(data, rng)
        elif how < 0.85:
            data = _in_lines(data, rng)
        else:
            data = _in_bytes(data, rng)
    return gzip.compress(data, 1) if rng.random() < 0.03 else data


def _in_json(data: bytes, rng: random.Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _in_bytes(data, rng)
    at: Any = value
    if not isinstance(at, dict | list) or not at:
        return json.dumps(rng.choice(EVIL)).encode()
    while True:
        key: Any = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.2:
            break
        at = at[key]
    match rng.randrange(6):
        case 0:
            at.pop(key)
        case 1 if isinstance(at, dict):
            name = key[:-1] if len(key) > 1 else key + "x"
            at[rng.choice((name, key.upper(), key.replace("i", ""), key + "\x1b[2J", "base", "software"))] = at.pop(key)
        case 2:
            deep: Any = 0
            for _ in range(rng.choice((70, 500))):
                deep = [deep]
            at[key] = deep
        case _:
            at[key] = rng.choice(EVIL)
    text = json.dumps(value)
    if rng.random() < 0.1 and isinstance(at, dict):  # a key twice
        text = text.replace("{", '{"x": 1, "x": 2, ', 1)
    if rng.random() < 0.05:
        text = text.replace(": 1", ": " + rng.choice(("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 3000)), 1)
    return text.encode("utf-8", "surrogatepass")


def _in_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    i = rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            lines.pop(i)
        case 1:
            lines.insert(i, lines[rng.randrange(len(lines))])
        case 2:
            cut = rng.randrange(len(lines[i]) + 1)
            lines[i] = lines[i][:cut]
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
    match rng.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return (
                data[:at]
                + rng.choice((b"\0", b"\xff", b"\x1b[31m", b"\xed\xa0\x80", b'"', b"}", b"[" * 3000))
                + data[at:]
            )
        case 2:
            return b"\xef\xbb\xbf" + data
        case 3:
            return data.replace(b"\n", b"\r\n")
        case 4:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case _:
            return data[at:] + data[:at]

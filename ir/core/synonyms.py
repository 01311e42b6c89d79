"""What other tools call a key or a value of ours."""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any


def synonym(word: str, known: Iterable[str]) -> tuple[str, ...] | None:
    """Those of the known words that mean the same; None for a word of which nothing is known.

    >>> synonym("tensor_model_parallel_size", ["tp", "pp"]), synonym("World_Size", ["tp", "pp"]), synonym("tq", ["tp"])
    (('tp',), (), None)
    """
    meant = _meanings().get(word.lower())
    return None if meant is None else tuple(k for k in known if k in meant and k != word)


def advice(word: str) -> str | None:
    """What is to be said where no single key means the word.

    >>> advice("train_iters"), advice("tp_size")
    ('piper-sim run JOB --steps N', None)
    """
    return next((group.get("fix") for group in _groups() if word.lower() in group["words"]), None)


@cache
def _meanings() -> Mapping[str, tuple[str, ...]]:
    return {word: tuple(group.get("keys", ())) for group in _groups() for word in group["words"]}


@cache
def _groups() -> tuple[Mapping[str, Any], ...]:
    return tuple(tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["group"])

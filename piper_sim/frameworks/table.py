"""The table of arguments: which framework calls what how, and where that is written. Read from arguments.csv."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ir.core.errors import ErrorKind, nearest, usage_error
from ir.core.files import FileErrors, read_text, read_toml

FORM = FileErrors("a launch", ErrorKind.JOB, "FILE", 4 * 10**6, "a launch script or config of a framework")
_HERE = Path(__file__).parent
_WRAPPED = re.compile(r"^(modules\.pre_trainer\.overrides\.|MODEL_ARGS\.|--?)+")
_TAILS = {"megatron", "megatron-bridge", "nemo", "gpt-neox", "deepspeed", "primus"}  # whose sections say nothing more


@dataclass(frozen=True)
class JobTableRow:
    """One meaning of some arguments. how: from their values to the fact (see values.py). names: the current spelling,
    then older ones, `*` for whatever comes. note: why it is inert, or what is presumed instead. source: who reads it.
    """

    framework: str
    how: str
    fact: str
    names: tuple[str, ...]
    note: str
    source: str


def framework_named(word: str) -> str:
    """The framework a user means.

    >>> framework_named("megatron-lm")
    'megatron'

    Raises PiperError (usage): no framework that is known.
    """
    name, known = facts()["aliases"].get(word.lower(), word.lower()), [c for c in chains() if c != "primus-torchtitan"]
    if name in known:
        return str(name)
    raise usage_error("--from", f"no framework {word!r}", nearest(word, known), known)


@cache
def rows(framework: str) -> tuple[JobTableRow, ...]:
    """A framework's own rows, as they stand."""
    table = csv.DictReader(read_text(_HERE / "arguments.csv", FORM).splitlines())
    found = (JobTableRow(names=tuple(r.pop("names").split()), **r) for r in table)
    return tuple(row for row in found if row.framework == framework)


@cache
def facts() -> Mapping[str, Any]:
    """facts.toml: the job's key of each fact, what frameworks presume, models and vocabularies by name."""
    return read_toml(_HERE / "facts.toml", FORM)


def chains() -> Mapping[str, tuple[str, ...]]:
    """Framework -> whose names it knows: its own first, then those that it takes over."""
    return {name: (name, *others) for name, others in facts()["chains"].items()}


@cache
def _names(framework: str) -> tuple[Mapping[str, JobTableRow], tuple[tuple[str, JobTableRow], ...]]:
    exact: dict[str, JobTableRow] = {}
    globs = []
    for row in rows(framework):
        for name in row.names:
            if "*" in name:
                globs.append((name, row))
            else:
                exact.setdefault(name, row)
                if framework == "accelerate":  # whose flags are its keys without their section
                    exact.setdefault(name.rpartition(".")[2], row)
    return exact, tuple(globs)


def row_of(framework: str, argument: str) -> JobTableRow | None:
    """What an argument means to a framework, None where no row has it. A section before a name says nothing more.

    >>> row_of("megatron-bridge", "model.num_moe_experts").fact, row_of("megatron", "--batch-size").fact
    ('experts', 'microbatch_size')
    """
    name = _WRAPPED.sub("", argument)
    if argument.startswith("-"):
        name = name.replace("-", "_")
    chain = chains().get(framework, (framework,))
    parts = name.replace("-", "_").split(".") if framework in _TAILS else [name]
    tails = [".".join(parts[i:]) for i in range(len(parts))]
    for own in chain:
        exact, _ = _names(own)
        if found := next((exact[t] for t in tails if t in exact), None):
            return found
    for own in chain:
        for tail in tails:
            for glob, row in _names(own)[1]:
                if fnmatchcase(tail, glob):
                    return row
    return None

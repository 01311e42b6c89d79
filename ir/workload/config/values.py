"""Typed access to the keys of one config, `layer_types` among them; errors name file, key and what is allowed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ir.core.errors import ErrorKind, PiperError, nearest, same_name
from ir.core.limits import divisors
from ir.workload.config.keys import ModelKey, ModelKeyType, Table, fits

_NUMBERS = (ModelKeyType.RATIO, ModelKeyType.RATIO_OR_NULL, ModelKeyType.WEIGHT, ModelKeyType.CHANCE)


@dataclass(frozen=True, slots=True)
class ModelValues:
    """The keys of a config of one model type. `inline`: those that the job set, so that errors name the job's key."""

    source: str
    table: Table
    given: Mapping[str, object]
    inline: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        for name, key in self.table.items():
            if name not in self.given:
                if key.required:
                    self.refuse(name, "missing", allowed=key.holds)
            elif not fits(key.holds, self.given[name]):
                self.refuse(name, f"{self.given[name]!r} is not {key.holds}", allowed=key.holds)
            elif key.only and not _among(self.given[name], key):
                allowed = ", ".join(map(_json, key.only))
                self.refuse(name, f"{_json(self.given[name])} is not built: {key.why}", allowed=allowed)

    def refuse(self, name: str, message: str, *, allowed: str | None = None, fix: str | None = None) -> NoReturn:
        """Raise the error that belongs to a key."""
        key = f"model.{name}" if name.partition(".")[0] in self.inline else name
        raise PiperError(ErrorKind.MODEL, message, file=self.source, key=key, allowed=allowed, suggestion=fix)

    def get(self, name: str) -> object:
        """The value, or Hugging Face's default."""
        return self.given[name] if name in self.given else self.table[name].default

    def plain(self, name: str) -> Any:
        """A value as it stands, numbers as floats where they need not be whole."""
        value, key = self.get(name), self.table.get(name)
        if key is not None and key.holds is ModelKeyType.SWITCH:
            return bool(value)
        return float(value) if key is not None and key.holds in _NUMBERS and value is not None else value  # type: ignore[arg-type]

    def size(self, name: str) -> int:
        value = self.get(name)
        assert isinstance(value, int), name
        return value

    def size_or(self, name: str, other: int) -> int:
        """An integer, or `other` where the key is null, left out without default, or nothing to the model type."""
        value = self.get(name) if name in self.table and self.table[name].is_read else None
        return value if isinstance(value, int) else other

    def number(self, name: str) -> float:
        value = self.get(name)
        assert isinstance(value, (int, float)), name
        return float(value)

    def flag(self, name: str) -> bool:
        """A truth value; false where the model type has no such key."""
        return bool(self.get(name)) if name in self.table else False

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        """A string out of a list."""
        value = self.get(name)
        if value not in allowed:
            self.refuse(name, f"{value!r} is not built", allowed=", ".join(allowed), fix=same_name(str(value), allowed))
        return str(value)

    def divides(self, name: str, whole: int, what: str) -> None:
        """Refuse unless the value of `name` divides `whole`."""
        by = self.size(name)
        if whole % by:
            near = max(d for d in divisors(whole) if d <= by)
            self.refuse(name, f"{by} does not divide {what} = {whole}", allowed=f"divisors of {whole}", fix=str(near))


def _among(value: object, key: ModelKey) -> bool:
    return any(value == o and isinstance(value, bool) is isinstance(o, bool) for o in key.only)


def _json(value: object) -> str:
    return json.dumps(value, default=list)


FULL, SLIDING = "full_attention", "sliding_attention"
_OLD = {"attention": FULL}


def layer_kinds(
    v: ModelValues, layers: int, known: tuple[str, ...], older: Mapping[str, str] = _OLD
) -> list[str] | None:
    """`layer_types`, where it is given. older: other names of kinds.

    Raises PiperError (model): kinds that are not among those `known`, or not as many as there are layers.
    """
    given = v.get("layer_types")
    if given is None:
        return None
    assert isinstance(given, (list, tuple))
    types = [older.get(str(t), str(t)) for t in given]
    if len(types) != layers:
        v.refuse("layer_types", f"{len(types)} kinds for {layers} layers", allowed=f"{layers} of them")
    if odd := [t for t in types if t not in known]:
        near = nearest(odd[0], known)
        v.refuse("layer_types", f"{odd[0]!r} is not built", allowed=", ".join(known), fix=near)
    return types

"""The keys of a Hugging Face config.json, per model type, as `keys.toml` has them; what each may hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from ir.core.errors import ErrorKind
from ir.core.files import FileErrors, read_toml, typed

_MOST = 10**15  # the largest size that is accepted
_Size = Annotated[int, Meta(ge=1, lt=_MOST)]
_Count = Annotated[int, Meta(ge=0, lt=_MOST)]
_Ratio = Annotated[float, Meta(gt=0, lt=_MOST)]


class ModelKeyType(StrEnum):
    """What a key may hold; the text stands in error messages. held: the same as a type."""

    held: Any

    def __new__(cls, text: str, held: Any) -> Self:
        kind = str.__new__(cls, text)
        kind._value_, kind.held = text, held
        return kind

    SIZE = "a positive integer", _Size
    COUNT = "an integer, 0 or more", _Count
    SIZE_OR_NULL = "a positive integer or null", _Size | None
    COUNT_OR_NULL = "an integer, 0 or more, or null", _Count | None  # 0 is null, which a job's TOML cannot say
    WORD_OR_NULL = "a token's id or null", Annotated[int, Meta(gt=-_MOST, lt=_MOST)] | None
    INDEX = "an integer, 0 or more, or -1 for the last", Annotated[int, Meta(ge=-1, lt=_MOST)]
    RATIO = "a number above 0", _Ratio
    WEIGHT = "a number, 0 or more", Annotated[float, Meta(ge=0, lt=_MOST)]
    CHANCE = "a number from 0 to below 1", Annotated[float, Meta(ge=0, lt=1)]
    FLAG = "true or false", bool
    SWITCH = "true or false, or a number that transformers takes for it", bool | _Count
    TEXT = "a string", str
    TEXT_OR_NULL = "a string or null", str | None
    TEXTS_OR_NULL = "a list of strings or null", list[str] | None
    COUNTS_OR_NULL = "a list of integers, 0 or more, or null", list[_Count] | None
    WEIGHTS_OR_NULL = "a list of numbers, 0 or more, or null", list[Annotated[float, Meta(ge=0, lt=_MOST)]] | None
    RATIO_OR_NULL = "a number above 0 or null", _Ratio | None
    SIZES = "a positive integer, or a list of them", _Size | Annotated[list[_Size], Meta(min_length=1)]
    SIZE_OR_TEXT = "a positive integer or a string", _Size | str
    TABLE_OR_NULL = "an object or null", dict[str, Any] | None
    LIST = "a list", list[Any]
    ANYTHING = "anything", Any


@dataclass(frozen=True, slots=True)
class ModelKey:
    """One key: what it may hold and what it means to leave it out. `default` is transformers'.

    only: the values that are built, () for all; why: the others are not, or, of a key that is never read, no value
    changes anything.
    """

    holds: ModelKeyType
    default: object = None
    required: bool = False
    only: tuple[object, ...] = ()
    why: str = ""

    @property
    def is_read(self) -> bool:
        """Whether any value of it says something of the model."""
        return bool(self.only) or self.holds is not ModelKeyType.ANYTHING


@dataclass(frozen=True)
class ParamNames:
    """A family's names of modules; the first three are whole, the others stand below a layer's prefix."""

    layers: str  # before the layer's number
    embed: str
    norm: str  # the last one, before the head
    attn_norm: str
    mlp_norm: str
    qkv: str  # the fused projection; "": three of them, q_proj, k_proj, v_proj
    out: str
    mlp: str  # before up and down
    up: str
    down: str
    mixer: str  # of layers with a recurrence in place of attention
    flipped: bool  # weights are stored (into, out), as GPT-2's Conv1D does


Table = Mapping[str, ModelKey]
_FILE = Path(__file__).with_name("keys.toml")
_FORM = FileErrors("the table of config keys", ErrorKind.MODEL, "model.config")
_RAW = read_toml(_FILE, _FORM)
_ATTENTION, _MIXED, _TOWERS = (
    read_toml(_FILE.with_name(f"{name}.toml"), _FORM) for name in ("forms", "hybrids", "towers")
)
_FORMS = _ATTENTION | _MIXED | _TOWERS | {"keys": _ATTENTION["keys"] | _MIXED["keys"]}
INERT, UNBUILT, OUTER = (
    {name: why for why, names in _RAW[table].items() for name in names.split()}
    for table in ("inert", "unbuilt", "outer")
)


def _key(row: Mapping[str, Any]) -> ModelKey:
    only = tuple(None if v == "null" else v for v in row.get("only", ()))
    holds = ModelKeyType[row.get("holds", "anything").upper()]
    return ModelKey(
        holds, row.get("default", only[0] if only else None), row.get("required", False), only, row.get("why", "")
    )


def _row(name: str) -> dict[str, Any]:
    """A family's row on top of the one that it is like; what both say of experts, or of recurrences, is one table."""
    own = _FORMS[name]
    out = _row(own["like"]) if "like" in own else {}
    tables = {t: {**out.get(t, {}), **own.get(t, {})} for t in ("moe", "mixer") if t in out or t in own}
    return {**out, **own, "base": own.get("base", False), "run": own.get("run", False), **tables}


_ROWS = {name: _row(name) for name in _FORMS if name != "keys"}
ROWS: Mapping[str, Mapping[str, Any]] = {name: row for name, row in _ROWS.items() if not row["base"]}
FORMS = {name: row for name, row in ROWS.items() if not row["run"]}  # predicted only
_SHARED = _RAW["shared"] | _RAW["types"] | {name: _FORMS[name]["keys"] for name in FORMS} | _FORMS["keys"]


def _table(raw: Mapping[str, Any]) -> Table:
    """A table on top of those that it is like."""
    out: dict[str, ModelKey] = {}
    for base in raw.get("like", ()):
        out |= _table(_SHARED[base])
    kept = {name: key for name, key in out.items() if name not in raw.get("without", ())}
    return kept | {name: _key(row) for name, row in raw.items() if name not in ("like", "without")}


_TYPES = _RAW["types"] | {name: row["keys"] for name, row in FORMS.items()}
_INERT = {name: ModelKey(ModelKeyType.ANYTHING, why=why) for name, why in INERT.items()}
TYPES: Mapping[str, Table] = {name: {**_INERT, **_table(raw)} for name, raw in _TYPES.items()}
INSIDE: Mapping[str, Table] = {name: {**_INERT, **_table(raw)} for name, raw in _RAW["inside"].items()}
_NAMES = typed(_RAW["names"], dict[str, ParamNames], _FORM, str(_FILE))


def aliases(model_type: str) -> Mapping[str, str]:
    """Other spellings of a model type's keys.

    >>> aliases("gpt2")["num_hidden_layers"], aliases("llama")["attn_pdrop"]
    ('n_layer', 'attention_dropout')
    """
    found: Mapping[str, str] = _RAW["aliases"].get(model_type, _RAW["aliases"]["any"])
    form: Mapping[str, Mapping[str, str]] = ROWS.get(model_type, {})
    return form.get("aliases", found)


def names_of(model_type: str) -> ParamNames:
    """How a model type spells its parameters.

    >>> names_of("mpt").mlp, names_of("qwen3").mlp
    ('ffn', 'mlp')
    """
    return _NAMES.get(model_type, _NAMES["any"])


def fits(holds: ModelKeyType, value: object) -> bool:
    """Whether a value is what a key may hold. `true` is no integer here, and neither NaN nor infinity is a number.

    >>> fits(ModelKeyType.SIZE, 4), fits(ModelKeyType.SIZE, True), fits(ModelKeyType.SIZE, 4.0)
    (True, False, False)
    """
    try:
        msgspec.convert(value, holds.held)
    except msgspec.ValidationError:
        return False
    return True

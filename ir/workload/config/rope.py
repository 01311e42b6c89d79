"""The rotary embedding of a config, in any spelling that transformers knows, as it computes it; or a refusal."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from ir.core.errors import nearest
from ir.workload.config.keys import ModelKeyType, fits
from ir.workload.config.spec import AttentionRopeScaling, AttentionRopeScalingKind
from ir.workload.config.values import ModelValues

TABLES = ("rope_parameters", "rope_scaling")
OF_ANY_KIND = ("rope_theta", "partial_rotary_factor")
_SHARED = ("rope_type", "type", *OF_ANY_KIND)
_KNOWN = {  # kind: its keys
    "default": "",
    AttentionRopeScalingKind.LINEAR: "factor",
    AttentionRopeScalingKind.LLAMA3: "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    AttentionRopeScalingKind.YARN: "factor original_max_position_embeddings beta_fast beta_slow attention_factor "
    "mscale mscale_all_dim truncate",
}
_REFUSED = {
    "dynamic": "its angles depend on the longest sequence seen",
    "longrope": "its angles depend on the longest sequence seen",
    "proportional": "only part of the features would be turned, at other angles",
    "mrope": "its positions are those of images",
}


@dataclass(frozen=True, slots=True)
class AttentionRope:
    """What a config says of it. share: of a head's features that are turned. score_scale: DeepSeek's, of the scores."""

    theta: float
    share: float
    scaling: AttentionRopeScaling | None = None
    score_scale: float = 1.0


def read_rope(v: ModelValues, dim: int, *, partial: bool = False, latent: bool = False) -> AttentionRope:
    """The rotary embedding of `dim` features of each head.

    partial: the family may turn some of them; latent: it is DeepSeek's, whose scores YaRN scales too.

    Raises PiperError (model): a kind, key or value that is not built; one thing said twice, in two ways.
    """
    reader = _Reader(v, *_table(v))
    theta, share = reader.either("rope_theta"), reader.either("partial_rotary_factor")
    if not partial and share != 1.0:
        reader.refuse("partial_rotary_factor", f"transformers' {v.get('model_type')} turns all features", allowed="1")
    kind = reader.kind()
    turned = int(dim * share)
    if turned < 1 or turned + turned % 2 > dim or (turned % 2 and kind == AttentionRopeScalingKind.YARN):
        name = "partial_rotary_factor" if partial else "qk_rope_head_dim" if latent else "head_dim"
        v.refuse(name, f"{turned} of {dim} features are turned, two by each angle", allowed="an even number of them")
    reader.check(kind)
    if kind == "default":
        return AttentionRope(theta, share)
    scaling = reader.scaling(AttentionRopeScalingKind(kind))
    if kind == AttentionRopeScalingKind.YARN and theta <= 1:
        reader.refuse("rope_theta", f"yarn takes the logarithm of {theta}", allowed="a number above 1")
    return AttentionRope(theta, share, scaling, reader.score_scale(scaling.factor) if latent else 1.0)


def _table(v: ModelValues) -> tuple[str, Mapping[str, object]]:
    """The table of a config and the key it is under. The job's stands before the file's."""
    for inline in (True, False):
        found = [n for n in TABLES if n in v.given and (n in v.inline) is inline and v.given[n]]
        if len(found) == 2 and v.given[found[0]] != v.given[found[1]]:
            v.refuse(found[1], f"{found[1]!r} and {found[0]!r} are one key with two values", fix=f"keep {found[0]}")
        if found:
            table = v.given[found[0]]
            assert isinstance(table, Mapping)
            return found[0], table
    return TABLES[0], {}


@dataclass(frozen=True, slots=True)
class _Reader:
    """The keys of one table."""

    v: ModelValues
    name: str
    table: Mapping[str, object]

    def refuse(self, key: str, message: str, *, allowed: str | None = None, fix: str | None = None) -> NoReturn:
        """Raise the error that belongs to a key, wherever it stands."""
        self.v.refuse(f"{self.name}.{key}" if key in self.table else key, message, allowed=allowed, fix=fix)

    def either(self, key: str) -> float:
        """A number beside the table or in it. The job's goes before the file's; said twice by one, it must agree."""
        inside, beside = f"{self.name}.{key}" in self.v.inline, key in self.v.inline
        if key in self.table and (inside or not beside):
            value = self.number(key)
            if inside is beside and key in self.v.given and self.v.number(key) != value:
                message = f"{value} here, and {self.v.number(key)} as {key}: one key with two values"
                self.refuse(key, message, fix=f"keep {self.name}.{key}")
            return value
        other = self.v.given.get(TABLES[1 - TABLES.index(self.name)])  # the file's, where this is the job's
        if not beside and isinstance(other, Mapping) and key in other:
            return replace(self, table=other).number(key)
        return self.v.number(key)

    def kind(self) -> str:
        """The kind of scaling, "default" for none."""
        kind = self.table.get("rope_type", self.table.get("type", "default"))
        if self.table.get("type", kind) != kind:
            self.refuse("type", f"{self.table['type']!r}, but rope_type is {kind!r}", fix="keep rope_type")
        if not isinstance(kind, str) or kind not in _KNOWN:
            why = f": {_REFUSED[kind]}" if isinstance(kind, str) and kind in _REFUSED else ""
            key = "rope_type" if "rope_type" in self.table else "type"
            self.refuse(key, f"{kind!r} is not built{why}", allowed=", ".join(_KNOWN))
        return str(kind)

    def check(self, kind: str) -> None:
        """Refuse keys that this kind does not have."""
        known = (*_KNOWN[kind].split(), *_SHARED)
        if odd := [k for k in self.table if k not in known]:
            near = nearest(odd[0], known)
            message = f"rotary embeddings of type {kind!r} have no key {odd[0]!r}"
            self.refuse(odd[0], message, allowed=", ".join(known), fix=near)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0. default: where it is left out or null; without one, it must be there."""
        value = self.table.get(key)
        if value is None and default is not None:
            return default
        if not fits(ModelKeyType.RATIO, value):
            said = "missing" if value is None else f"{value!r} is not {ModelKeyType.RATIO}"
            self.v.refuse(f"{self.name}.{key}", said, allowed=ModelKeyType.RATIO)
        assert isinstance(value, (int, float))
        return float(value)

    def scaling(self, kind: AttentionRopeScalingKind) -> AttentionRopeScaling:
        """The numbers of a kind, with transformers' defaults."""
        factor = self.number("factor")
        if kind is AttentionRopeScalingKind.LINEAR:
            return AttentionRopeScaling(kind, factor)
        original = int(self.number("original_max_position_embeddings", self.v.size("max_position_embeddings")))
        if kind is AttentionRopeScalingKind.LLAMA3:
            slow, fast = self.number("low_freq_factor"), self.number("high_freq_factor")
            if fast < slow:  # equal, as Llama 4 Scout has them: no angle is mixed
                self.refuse("high_freq_factor", f"{fast} is below low_freq_factor = {slow}")
            return AttentionRopeScaling(kind, factor, original, slow, fast)
        slow, fast = self.number("beta_slow", 1.0), self.number("beta_fast", 32.0)
        if fast < slow:
            self.refuse("beta_fast", f"{fast} is below beta_slow = {slow}")
        truncate = self.table.get("truncate", True)
        if not isinstance(truncate, bool):
            self.refuse("truncate", f"{truncate!r} is not {ModelKeyType.FLAG}", allowed=ModelKeyType.FLAG)
        return AttentionRopeScaling(kind, factor, original, slow, fast, truncate, self._times(factor))

    def _times(self, factor: float) -> float:
        """YaRN's factor on cosines and sines."""
        if self.table.get("attention_factor") is not None:
            return self.number("attention_factor")
        if self._weight("mscale") and self._weight("mscale_all_dim"):
            return _mscale(factor, self._weight("mscale")) / _mscale(factor, self._weight("mscale_all_dim"))
        return _mscale(factor, 1.0)

    def score_scale(self, factor: float) -> float:
        """What DeepSeek's attention does to its scores beside."""
        every = self._weight("mscale_all_dim")
        return _mscale(factor, every) ** 2 if every else 1.0

    def _weight(self, key: str) -> float:
        value = self.table.get(key)
        if value is not None and not fits(ModelKeyType.WEIGHT, value):
            self.refuse(key, f"{value!r} is not {ModelKeyType.WEIGHT}", allowed=ModelKeyType.WEIGHT)
        return float(value) if isinstance(value, (int, float)) else 0.0


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

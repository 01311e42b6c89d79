"""First values from a checkpoint of the Hub: safetensors under the names that transformers saves, share by share."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from executor.parallel.shares import ParamShard
from ir.core.errors import ErrorKind, job_error, nearest
from ir.core.files import FileErrors, check_regular, read_json, typed

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
BIAS = "e_score_correction_bias"  # beside a router's weight; no gradient trains it
FORM = FileErrors("weights", ErrorKind.IO, "model.weights", fix="a folder of safetensors files")
_MAPPED = replace(FORM, most=2**50)  # bytes of what is not read whole
_LOOKED_AT, _BLOCKS, _BLOCK = 2**20, 64, 2**10  # elements that a digest is made of
NUMBERS = ("F64", "F32", "BF16", "F16")
COUNTS = ("I64", "I32", "I16", "I8", "U8", "BOOL")  # of buffers, which may be indices and masks
_EXPERTS = re.compile(r"(.+\.)mlp\.experts\.(gate_up|down)_proj")
_SPELT = {  # an expert's place in a layer, and its products
    "": ("mlp.experts", {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}),
    "mixtral": ("block_sparse_moe.experts", {"gate_up": ("w1", "w3"), "down": ("w2",)}),
}
# What files have beside a model's parameters: tables made of sizes, and second copies of what is tied.
_TABLES = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")
_TIED = ("lm_head.weight", "*.layers.*.embed_tokens.weight", "*.shared_head.head.weight")


@dataclass(frozen=True, slots=True)
class StoredParam:
    """How files store a parameter: one tensor, or, of stacked experts, for each the tensors whose rows make it up."""

    names: tuple[tuple[str, ...], ...]
    stacked: bool = False

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], model_type: str) -> StoredParam:
        """As transformers saves it.

        >>> StoredParam.of("model.layers.0.mlp.experts.down_proj", (2, 8, 4), "mixtral").names[1]
        ('model.layers.0.block_sparse_moe.experts.1.w2.weight',)
        >>> StoredParam.of("model.norm.weight", (8,), "mixtral").names
        (('model.norm.weight',),)
        """
        if found := _EXPERTS.fullmatch(name):
            place, products = _SPELT.get(model_type, _SPELT[""])
            stem = f"{found[1]}{place}"
            each = products[found[2]]
            return cls(tuple(tuple(f"{stem}.{e}.{p}.weight" for p in each) for e in range(shape[0])), stacked=True)
        if model_type == "mixtral":
            name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
        return cls(((name,),))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of each of its tensors."""
        return (whole[1] // len(self.names[0]), *whole[2:]) if self.stacked else whole


def _spellings(name: str, shape: tuple[int, ...]) -> list[StoredParam]:
    """All that are known: as transformers has it in memory, as each family saves it, GPT-2's without its prefix; and of
    a module that peft has put adapters in the same, under the name that it had before.
    """
    bare = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    short = bare.removeprefix("transformer.")
    families = [StoredParam.of(bare, shape, t) for t in _SPELT]
    return [StoredParam(((name,),)), StoredParam(((bare,),)), *families, StoredParam(((short,),))]


@dataclass(frozen=True)
class HubCheckpoint:
    """The tensors of a folder of safetensors files, or of one such file. drawn: patterns of parameters' names that they
    need not have.

    Files are mapped, and of each tensor only what a rank holds is copied. Raises PiperError (io): a file that is
    not there, that the index names outside of the folder, or that is no safetensors file.
    """

    path: Path
    drawn: tuple[str, ...] = ()

    @cached_property
    def _tensors(self) -> Mapping[str, tuple[Path, Any]]:
        """Each tensor's file, and that file opened (untyped)."""
        out: dict[str, tuple[Path, Any]] = {}
        for file in self._files():
            check_regular(file, _MAPPED)
            try:
                opened: Any = safe_open(file, "pt")  # untyped
            except (SafetensorError, OSError) as error:
                raise FORM.wrong(f"cannot read tensors: {error}", str(file), None, FORM.fix) from None
            names: list[str] = list(opened.keys())
            for name in names:
                if name in out:
                    message = f"{name} is in {out[name][0].name}, too"
                    raise FORM.wrong(message, str(file), None, f"each tensor once, or {INDEX}")
                out[name] = file, opened
        return out

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        if (self.path / WHOLE).exists():  # first, as transformers takes them
            return [self.path / WHOLE]
        if (self.path / INDEX).exists():
            said = str(self.path / INDEX)
            index = typed(read_json(said, FORM), dict[str, Any], FORM, said)
            names = sorted(set(typed(index.get("weight_map"), dict[str, str], FORM, said, "weight_map").values()))
            if odd := next((n for n in names if Path(n).name != n), None):
                raise FORM.wrong(f"{odd!r} is not in this folder", said, "weight_map", "names of files")
            return [self.path / n for n in names]
        found = sorted(self.path.glob("*.safetensors"))
        if not found:
            raise FORM.wrong("a folder without safetensors files", str(self.path), None, f"{WHOLE}, or {INDEX}")
        return found

    def check(self, shapes: Mapping[str, tuple[int, ...]], biases: Mapping[str, tuple[int, ...]]) -> None:
        """Raise PiperError for a parameter that is missing or has another shape or format, and for one that is left."""
        read = set[str]()
        self._check_drawn(shapes)
        for name, shape in {**shapes, **biases}.items():
            if self.lacks(name, shape):
                continue
            at = self._find(name, shape)
            for tensor in (n for names in at.names for n in names):
                self._check(tensor, at.shape(shape), NUMBERS if name in shapes else NUMBERS + COUNTS)
                read.add(tensor)
        tied = {n for n in self._tensors if n not in read and any(fnmatchcase(n, u) for u in _TIED)}
        if left := [n for n in self._tensors if not (n in read or n in tied or self._is_table(n))]:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            message = f"the job's model has no parameter for {left[0]}{more}"
            raise FORM.wrong(message, str(self._tensors[left[0]][0]), None, "the weights of the job's model.config")
        for name in sorted(tied):
            self._check_copy(name, shapes)

    def _check_drawn(self, names: Iterable[str]) -> None:
        """Raise PiperError (job) for a pattern that no parameter is called by: a typo."""
        for pattern in self.drawn:
            if not any(fnmatchcase(n, pattern) for n in names):
                message, fix = f"no parameter is called {pattern!r}", nearest(pattern, names)
                raise job_error("model.drawn", message, fix, f"patterns of names like {min(names)}")

    def lacks(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether they do not have a parameter, and need not."""
        return any(fnmatchcase(name, p) for p in self.drawn) and self._at(name, shape) is None

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def beside(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Tensors of no parameter that is trained: buffers of a module, and what of it is frozen, in the order of their
        names. shapes: of those that are trained; second copies of theirs would be out of date, and are none of these.
        """
        each = (self._find(name, shape) for name, shape in shapes.items() if not self.lacks(name, shape))
        found = (names for at in each for names in at.names)
        read = {n for names in found for n in names}
        return sorted(n for n in self._tensors if not (n in read or self._is_table(n) or self._is_copy(n, read)))

    def _is_table(self, name: str) -> bool:
        """Whether a tensor is made of sizes. GPT-2's mask has two dimensions: a vector of that name is trained."""
        made = any(fnmatchcase(name, u) for u in _TABLES)
        return made and not (name.endswith(".attn.bias") and len(self._shape(name)) == 1)

    def _is_copy(self, name: str, read: Iterable[str]) -> bool:
        """Whether a tensor is what is tied to one of those that are read, by its name and by its values."""
        if not any(fnmatchcase(name, u) for u in _TIED):
            return False
        shape = self._shape(name)
        return any(_equal(self.tensor(name), self.tensor(n)) for n in read if self._shape(n) == shape)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name][1].get_slice(name).get_shape())

    def _check_copy(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """A tensor that is not read must be what is read instead: transformers ties no weights that differ."""
        whole = _TIED[0] if name.endswith(".head.weight") and _TIED[0] in shapes else next(iter(shapes))
        if not _equal(self.tensor(name), self.tensor(self._find(whole, shapes[whole]).names[0][0])):
            message, fix = f"{name} has other values than {whole}, and the job's model has one of both", None
            if name == _TIED[0]:
                fix = "model.tie_word_embeddings = false"
            raise FORM.wrong(message, str(self._tensors[name][0]), None, "equal values, or a model that has both", fix)

    def _check(self, name: str, shape: tuple[int, ...], forms: tuple[str, ...]) -> None:
        file, opened = self._tensors[name]
        found = opened.get_slice(name)
        if (has := tuple(found.get_shape())) != shape:
            message = f"{name} is {' x '.join(map(str, has))}, the job's model has {' x '.join(map(str, shape))}"
            raise FORM.wrong(message, str(file), None, "the weights of the job's model.config")
        if (form := found.get_dtype()) not in forms:
            message = f"{name} is stored in {form}, whose scales are not applied here"
            raise FORM.wrong(message, str(file), None, ", ".join(NUMBERS), "weights that are not quantised")

    def _at(self, name: str, shape: tuple[int, ...]) -> StoredParam | None:
        each = _spellings(name, shape)
        return next((at for at in each if all(n in self._tensors for names in at.names for n in names)), None)

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredParam:
        if (found := self._at(name, shape)) is not None:
            return found
        near, allowed = (
            nearest(name, self._tensors),
            "all parameters of the job's model but those that model.drawn names",
        )
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        fix = f'{f"{near}, or " if near else ""}model.drawn = ["{pattern}"], if it is new and trained'
        raise FORM.wrong(f"no tensor for {name}", str(self.path), None, allowed, fix)

    def read(self, name: str, share: ParamShard, dtype: torch.dtype) -> Tensor:
        """A rank's share of a parameter: a tensor of its own, rounded to `dtype`."""
        at, out = self._find(name, share.shape), torch.empty(share.local, dtype=dtype, device="cpu")
        if not at.stacked:
            return out.copy_(share.take(self.tensor(at.names[0][0])))
        by_expert = next((c for c in share.cuts if c.dim == 0), None)
        held = range(share.shape[0]) if by_expert is None else by_expert.rows().tolist()
        rest = ParamShard(share.shape[1:], tuple(replace(c, dim=c.dim - 1) for c in share.cuts if c.dim))
        for k, e in enumerate(held):
            out[k] = rest.take(torch.cat([self.tensor(n) for n in at.names[e]]))
        return out

    def tensor(self, name: str) -> Tensor:
        """One tensor as it is stored."""
        found: Tensor = self._tensors[name][1].get_tensor(name)
        return found

    def digest(self, names: Iterable[str]) -> str:
        """SHA-256 of some tensors' values in float64; of a large one's, as frozen weights are, some all over."""
        out = hashlib.sha256()
        for name in names:
            out.update(_sampled(self.tensor(name)).double().numpy().tobytes())
        return out.hexdigest()


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) if a.dtype == b.dtype else torch.equal(a.double(), b.double())


def _sampled(t: Tensor) -> Tensor:
    """A tensor's elements; of more than `_LOOKED_AT` blocks at even distances, the first and the last among them.

    >>> _sampled(torch.arange(2**21)).shape, _sampled(torch.arange(6).view(2, 3)).shape
    (torch.Size([65536]), torch.Size([6]))
    """
    flat = t.flatten()
    if len(flat) <= _LOOKED_AT:
        return flat
    starts = torch.linspace(0, len(flat) - _BLOCK, _BLOCKS, dtype=torch.float64).long().tolist()
    return torch.cat([flat[s : s + _BLOCK] for s in starts])


def biases(shapes: Mapping[str, tuple[int, ...]], scoring: str | None) -> dict[str, tuple[int, ...]]:
    """The corrections beside routers that score by sigmoid, and their shapes: no parameters, yet part of a checkpoint.

    >>> biases({"model.layers.3.mlp.gate.weight": (8, 64)}, "sigmoid")
    {'model.layers.3.mlp.gate.e_score_correction_bias': (8,)}
    """
    gates = {n: s for n, s in shapes.items() if n.endswith(".mlp.gate.weight")} if scoring == "sigmoid" else {}
    return {f"{n.removesuffix('weight')}{BIAS}": s[:1] for n, s in gates.items()}

"""From a Hugging Face config (a preset, or a path to config.json) to a `ModelConfig`, strictly."""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from ir.core.errors import ErrorKind, PiperError, nearest, same_name
from ir.core.files import FileErrors, check_plain, read_json, read_text, typed
from ir.core.limits import LAYERS
from ir.workload.config.forms import read_form
from ir.workload.config.keys import INERT, OUTER, TYPES, UNBUILT, aliases
from ir.workload.config.rope import OF_ANY_KIND
from ir.workload.config.spec import ModelConfig
from ir.workload.config.values import ModelValues

FORM = FileErrors("a model config", ErrorKind.MODEL, "model.config", 10**7, "a Hugging Face config.json", finite=False)
_MODELLED = replace(FORM, finite=True)  # Mamba's configs hold infinite limits, of which nothing is read
_PRESETS = Path(__file__).parent / "presets"
_READ: dict[tuple[str, ...], ModelConfig] = {}  # by the file's text and all else: configurations of one job ask for one
_MOST_READ = 16
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_num_layers")


@cache
def presets() -> tuple[str, ...]:
    """Names of the models that come with piper-sim.

    >>> "deepseek-v3" in presets()
    True
    """
    return tuple(sorted(p.stem for p in _PRESETS.glob("*.json")))


def load_config(
    name_or_path: str, overrides: Mapping[str, object] | None = None, beside: Collection[str] = ()
) -> ModelConfig:
    """Read a preset or a config.json; `overrides` are Hugging Face keys set inline in the job's `[model]`, among the
    job's own keys (`beside`), of which one may be meant where a key is unknown.

    >>> load_config("llama3-8b", {"num_hidden_layers": 2}).layers
    2

    Raises PiperError (model): unknown preset, key or model type; a missing or impossible value. (io): unreadable file.
    """
    path = _find(name_or_path)
    label = name_or_path if path.parent == _PRESETS else str(path)
    with FORM.naming(label):
        key = (read_text(path, FORM), label, repr(overrides), repr(beside))
        if key not in _READ:
            if len(_READ) >= _MOST_READ:
                _READ.pop(next(iter(_READ)))
            _READ[key] = config_from(raw_config(name_or_path), label, overrides or {}, beside)
        return _READ[key]


def raw_config(name_or_path: str) -> dict[str, object]:
    """The keys of a preset or of a config.json, as they stand there.

    >>> raw_config("tiny-llama")["model_type"]
    'llama'

    Raises PiperError (model): unknown preset; (io): unreadable file.
    """
    path = _find(name_or_path)
    return typed(read_json(path, FORM), dict[str, object], FORM, str(path))


def config_from(
    raw: Mapping[str, object], source: str, overrides: Mapping[str, object] | None = None, beside: Collection[str] = ()
) -> ModelConfig:
    """The same from a config already in memory. `source` names it in errors.

    Raises PiperError (model): an unknown key or model type; a missing or impossible value.

    >>> tiny = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 8, "n_layer": 1, "n_head": 2}
    >>> config_from(tiny, "tiny").ffn
    32
    """
    over = dict(overrides or {})
    if isinstance(text := raw.get("text_config"), Mapping):
        raw = _language_model(raw, text, source)
    model_type = over.get("model_type", raw.get("model_type"))
    key = "model.model_type" if "model_type" in over else "model_type"
    if not isinstance(model_type, str) or model_type not in TYPES:
        said = "missing" if model_type is None else f"unknown model type {model_type!r}"
        said = f"{model_type!r} is not built: it has {UNBUILT[str(model_type)]}" if str(model_type) in UNBUILT else said
        near = same_name(str(model_type), TYPES)  # the closest other one would be another architecture
        raise PiperError(ErrorKind.MODEL, said, file=source, key=key, allowed=sorted(TYPES), suggestion=near)
    file = _respelled(raw, model_type, source, "")
    inline = _respelled(over, model_type, source, "model.")
    _refuse_unknown(file, model_type, source, "")
    check_plain({k: v for k, v in file.items() if TYPES[model_type][k].is_read}, _MODELLED, source)
    _refuse_unknown(inline, model_type, source, "model.", beside)
    for name in _DEPTHS:
        deep = inline.get(name, file.get(name))
        if isinstance(deep, int) and deep > LAYERS:  # before anything counts them out one by one
            message, key = f"{deep} layers", f"model.{name}" if name in inline else name
            raise PiperError(ErrorKind.MODEL, message, file=source, key=key, allowed=f"at most {LAYERS}")
    given = {**file, **{k: _merged(file.get(k), v) for k, v in inline.items()}}
    dotted = (f"{k}.{inner}" for k, table in inline.items() if isinstance(table, Mapping) for inner in table)
    values = ModelValues(source, TYPES[model_type], given, frozenset((*inline, *dotted)))
    return read_form(values)


def _language_model(raw: Mapping[str, object], text: Mapping[str, object], source: str) -> Mapping[str, object]:
    """The `text_config` of a model with other towers; what stands beside it and is the whole model's goes with it."""
    whole = {k: v for k, v in raw.items() if k in ("tie_word_embeddings", "quantization_config") and k not in text}
    known = {"text_config", "model_type", "initializer_range", *whole, *text, *INERT, *OUTER}
    if odd := [k for k in raw if k not in known]:
        message = f"{odd[0]!r} beside text_config is not understood"
        raise PiperError(ErrorKind.MODEL, message, file=source, key=odd[0], allowed=sorted(OUTER))
    return {**text, **whole}


def _refuse_unknown(
    given: Mapping[str, object], model_type: str, source: str, prefix: str, beside: Collection[str] = ()
) -> None:
    """A key that transformers' class may read is not passed over: it may make another model of it."""
    if not (odd := [k for k in given if k not in TYPES[model_type]]):
        return
    keys = dict.fromkeys((*TYPES[model_type], *aliases(model_type), *beside))  # each once, in one order
    known = [k for k in keys if k not in INERT]
    others = f", and {len(odd) - 1} more: {', '.join(odd[1:6])}" if len(odd) > 1 else ""
    near = nearest(odd[0], [k for k in known if k not in given])
    fix = near or (None if prefix else "leave it out of the file if it says nothing of the model")
    message = f"model type {model_type} has no key {odd[0]!r} that is understood{others}"
    raise PiperError(ErrorKind.MODEL, message, file=source, key=prefix + odd[0], allowed=sorted(known), suggestion=fix)


def _flat(raw: Mapping[str, object], own: Collection[str]) -> dict[str, object]:
    """With tables whose keys the type knows one by one (`attn_config.clip_qkv`) written out."""
    tables = {k.partition(".")[0] for k in own if "." in k and k not in INERT}  # transformers.js_config
    out: dict[str, object] = {}
    for k, v in raw.items():
        if k not in tables:
            out[k] = v
        elif isinstance(v, Mapping):
            out |= {f"{k}.{inner}": x for inner, x in v.items() if inner not in INERT}
    return out


def _merged(file: object, inline: object) -> object:
    """A table set inline goes into the file's key by key. One that says what kind of table it is stands in its place,
    but for what is no matter of kind.
    """
    if not isinstance(file, Mapping) or not isinstance(inline, Mapping):
        return inline
    kept = OF_ANY_KIND if {"rope_type", "type", "quant_method"} & set(inline) else file
    return {**{k: v for k, v in file.items() if k in kept}, **inline}


def _find(name: str) -> Path:
    if name in presets():
        return _PRESETS / f"{name}.json"
    path = Path(name)
    if os.path.isfile(path / "config.json"):
        return path / "config.json"
    if os.path.isfile(path) or name.endswith(".json"):
        return path
    message, allowed = f"no preset and no file {name!r}", [*presets(), "a path to a config.json"]
    unfetched = "the path to its config.json: nothing is fetched from the Hub" if "/" in name else None
    fix = _nearest_preset(name) or unfetched
    raise PiperError(ErrorKind.MODEL, message, key="model.config", allowed=allowed, suggestion=fix)


def _nearest_preset(name: str) -> str | None:
    """The closest preset, where all numbers of the name are the same: they say which model it is.

    >>> _nearest_preset("deepseek_v3"), _nearest_preset("llama3.1-8b")
    ('deepseek-v3', None)
    """
    near = nearest(name, presets())
    return near if near and re.findall(r"\d+", near) == re.findall(r"\d+", name) else None


def _respelled(raw: Mapping[str, object], model_type: str, source: str, prefix: str) -> dict[str, object]:
    """`raw` with each alias under its proper name; both spellings at once are refused."""
    other = aliases(model_type)
    own = TYPES[model_type]
    out: dict[str, object] = {}
    said: dict[str, str] = {}
    for k, v in _flat(raw, own).items():
        name = k if k in own else other.get(k, k)
        if name in out and out[name] != v:
            message = f"{k!r} and {said[name]!r} are one key with two values"
            raise PiperError(ErrorKind.MODEL, message, file=source, key=prefix + k, suggestion=f"keep {name}")
        out[name], said[name] = v, k
    return out

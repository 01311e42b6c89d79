"""Reading a job: TOML, `--set`, types, ranges, the lists of `[search]`, the nearest key for a typo."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from ir.core.errors import ErrorKind, PiperError, job_error, nearest, usage_error
from ir.core.files import FileErrors, check_plain, read_toml, typed
from ir.job.schema import OPEN, Job, JobOptimizer, JobParallel, JobSchedule, JobSearch, ModelSection
from ir.job.table import keys_of, toml_value
from ir.schedules.registry import NAMES, canonical
from ir.workload.config.load import presets

_FIX = 'a job file in TOML: [model] config = "llama3-8b"'
FORM = FileErrors("a job", ErrorKind.JOB, "JOB", 10**6, _FIX, finite=False, smallest=1e-30)
_ALTERNATIVES = ("name", "directives", "builder", "csv")  # of [schedule]
_BATCHES = ("microbatches", "global_batch")
_SPEED = (1e-3, 1e3)


def load_job(path: str | Path | Mapping[str, Any], set: Iterable[str] = ()) -> Job:
    """A job from a file in TOML, or from its sections as a mapping; then `section.key=value` overrides.

    Raises PiperError (io): no such file; (job): not TOML, an unknown key, a wrong type or range; (usage): an override
    that sets nothing.

    >>> load_job({"model": {"config": "tiny-llama"}}, set=["parallel.pp=2"]).parallel.pp
    2
    """
    sets = [set] if isinstance(set, str) else set  # else each letter would be an override
    if isinstance(path, Mapping):
        return job_from(path, sets)
    if not isinstance(path, (str, PathLike)):
        raise usage_error("load_job", f"no job can be read from {path!r:.40}", _FIX, "a path, or sections as a mapping")
    return job_from(read_toml(path, FORM), sets, str(path))


def no_job(given: object) -> PiperError:
    """The error of a path, sections or a list where the library takes a job."""
    said, fix = f"{given!r:.40} is no job", "piper_sim.load_job(path or sections)"
    return usage_error("job", said, fix, "what load_job returns")


def job_from(table: Mapping[str, Any], sets: Iterable[str] = (), file: str = "job") -> Job:
    """A job from a parsed table.

    >>> job_from({"model": {"config": "tiny-llama"}}, ["parallel.pp=2"]).parallel.pp
    2
    """
    merged: dict[str, Any] = deepcopy(dict(table))
    named: set[str] = set()
    for item in sets:
        section, key, *_ = _set(merged, item)
        if section == "schedule":
            named.add(key)
    for one_of in map(set, (_ALTERNATIVES, _BATCHES)):
        if named & one_of:  # --set schedule.csv=… is meant instead of the file's schedule.name; two of them are refused
            for key in one_of - named:
                merged["schedule"].pop(key, None)
    with FORM.naming(file):
        return _job(merged, file)


def _set(table: dict[str, Any], item: str) -> list[str]:
    path, eq, text = str(item).partition("=")
    keys = path.strip().split(".")
    if not eq or len(keys) < 2 or not all(keys):
        raise usage_error("--set", f"{item!r} sets nothing", allowed="--set section.key=value")
    at = table
    for k in keys[:-1]:
        at = at.setdefault(k, {})
        if not isinstance(at, dict):
            raise usage_error(f"--set {path}", f"{k} is a value, not a section", allowed="--set section.key=value")
    at[keys[-1]] = _bare(text.strip())
    return keys


def _bare(text: str) -> Any:
    """A TOML value, or the text itself."""
    try:
        found = tomllib.loads(f"x = {text}")
    except (ValueError, RecursionError):
        return text
    return found["x"] if len(found) == 1 else text  # more than one: a line break in it


def _job(table: Mapping[str, Any], file: str) -> Job:
    check_plain(table, FORM)
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, str) and (key := _key_of_word(name, value)):
            raise job_error(name, f"{value!r} is no table", f"{name}.{key} = {toml_value(value)}", "a table of keys")
        found[name] = _with_overrides(name, value) if name in OPEN and isinstance(value, dict) else value
    speed = found["cluster"].get("speed") if isinstance(found.get("cluster"), dict) else None
    if isinstance(speed, dict):
        found["cluster"]["speed"] = {str(rank): factor for rank, factor in speed.items()}  # Python's ranks are numbers
        for rank, factor in found["cluster"]["speed"].items():
            _check_speed(rank, factor)
    found.setdefault("model", {"overrides": {}})
    if _names_module(found["model"]) and isinstance(found.setdefault("parallel", {}), dict):
        found["parallel"] = {"sequence_parallel": False} | found["parallel"]  # what suits a module its author knows
    job = replace(typed(found, Job, FORM), file=file)
    if job.cluster.speed and job.cluster.slow_nodes is not None:
        message, fix = "speed names slow ranks, and here nobody knows which they are", "leave cluster.speed out"
        raise job_error("cluster.slow_nodes", message, fix, "one of the two")
    given = job.model.config or job.model.graph or job.model.module
    if not given and "model_type" not in job.model.overrides:
        raise _no_model(job.model.overrides)
    if job.model.drawn and job.model.weights is None:
        message = "says what the files of model.weights need not have, and there are none: all is drawn"
        raise job_error("model.drawn", message, "leave it out", "patterns of names, beside model.weights")
    _check_schedule(job.schedule)
    if job.schedule.layout is not None and job.parallel.layers != "balanced":
        message = "layout and parallel.layers both say where layers stand"
        raise job_error("schedule.layout", message, "leave parallel.layers out")
    _check_optimizer(job.optimizer)
    if (job.run.eval_every is None) != (job.run.eval_source is None):
        key, other = ("eval_source", "eval_every") if job.run.eval_source is None else ("eval_every", "eval_source")
        usual = '"held_out.txt"' if key == "eval_source" else "100"
        message = f"{other} is given, and no {key}"
        raise job_error(f"run.{key}", message, f"{key} = {usual}", "both or none")
    return replace(job, search=tried(job.search, FORM))


def _names_module(model: object) -> bool:
    """Whether a model is somebody's own module."""
    return isinstance(model, dict) and ("graph" in model or ("module" in model and "config" not in model))


def _key_of_word(section: str, word: str) -> str | None:
    """The key a word is meant for that stands where a section does."""
    if section == "model" and (word in presets() or word.endswith(".json")):
        return "config"
    return "name" if section == "schedule" and word in NAMES else None


def _no_model(keys: Mapping[str, object]) -> PiperError:
    """The error of a job that says no model, or says it under a key of its own."""
    allowed = "a preset or a path to config.json, or model_type and the keys of one"
    for key, value in keys.items():
        if isinstance(value, str) and _key_of_word("model", value):
            return job_error(f"model.{key}", "is not where a model is said", f"config = {toml_value(value)}", allowed)
    return job_error("model.config", "no model", '"llama3-8b"', allowed)


def _with_overrides(section: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """An open section, its other keys under `overrides`."""
    known = keys_of(section)
    own = {k: v for k, v in table.items() if k in known}
    return own | {"overrides": {k: v for k, v in table.items() if k not in known}}


def _check_schedule(s: JobSchedule) -> None:
    given = [k for k in _ALTERNATIVES if getattr(s, k) is not None]
    if len(given) > 1:
        message, allowed = f"{' and '.join(given)} are both given", "one of " + ", ".join(_ALTERNATIVES)
        raise job_error("schedule", message, f"keep {given[-1]}", allowed)
    if s.global_batch is not None and s.microbatches is not None:
        fix = "keep global_batch: microbatches follow from it"
        raise job_error("schedule", "global_batch and microbatches are both given", fix)
    if s.name is not None:
        scheduled(s.name, "schedule.name")


def _check_optimizer(o: JobOptimizer) -> None:
    if o.schedule != "constant" and o.decay_steps is None:
        message, fix = f"{o.schedule} over how many steps?", "decay_steps = 1000"
        raise job_error("optimizer.decay_steps", message, fix, "1 or more")
    if o.schedule == "constant" and (idle := "decay_steps" if o.decay_steps else "min_lr" if o.min_lr else None):
        message, known = "says how lr falls, and it is constant", "cosine, linear, wsd"
        raise job_error(f"optimizer.{idle}", message, allowed=f"schedule = {known}")
    own = {k: getattr(JobOptimizer, k) for k in ("momentum", "nesterov", "ns_steps", "adjust_lr", "tp_mode")}
    if o.name != "muon" and (idle := next((k for k, v in own.items() if getattr(o, k) != v), None)):
        message = f"says how matrices are orthogonalised, and {o.name} does not"
        raise job_error(f"optimizer.{idle}", message, 'name = "muon"', "with muon alone")
    if o.min_lr > o.lr:
        message = f"min_lr {o.min_lr:g} is above lr {o.lr:g}"
        raise job_error("optimizer.min_lr", message, allowed=f"0 to {o.lr:g}")


def _check_speed(rank: str, speed: object) -> None:
    low, high = _SPEED
    fine = isinstance(speed, int | float) and not isinstance(speed, bool) and low <= speed <= high
    if not (rank.isascii() and rank.isdigit() and rank == str(int(rank[:9]))) or not fine:
        allowed = f"{{ rank = factor }}, a factor from {low:g} to {high:g}"
        raise job_error("cluster.speed", f"speed of rank {rank!r} is {speed!r}", "speed = { 17 = 0.8 }", allowed)


_FIXED = ("directives", "builder", "csv", "microbatches", "global_batch")
KEYS: Mapping[str, str] = {
    **{f.name: "parallel" for f in fields(JobParallel)},
    **{f.name: "schedule" for f in fields(JobSchedule) if f.name not in _FIXED},
    "attention": "model",
    "offload": "optimizer",
}
_LAYERS = ("balanced", "even")
_SECTIONS: Mapping[str, type] = {
    "parallel": JobParallel,
    "schedule": JobSchedule,
    "model": ModelSection,
    "optimizer": JobOptimizer,
}


def tried(search: JobSearch, form: FileErrors) -> JobSearch:
    """With every listed value as its section holds it.

    Raises PiperError (job): a key that cannot vary, a list without a value, a value that the key does not take, or a
    key both listed and pinned.
    """
    found = {key: _values(key, values, form) for key, values in search.overrides.items()}
    for key in search.pin:
        if key not in KEYS:
            near = nearest(key, KEYS)
            fix = f"pin = {toml_value([near if k == key else k for k in search.pin])}" if near else None
            raise form.wrong(f"pinned is {key!r}, which nothing varies", None, "search.pin", ", ".join(KEYS), fix)
        if key in found:
            raise form.wrong(f"{key} is listed and pinned", None, "search.pin", "one of the two", f"leave out {key}")
    return replace(search, overrides=found)


def _values(key: str, values: object, form: FileErrors) -> tuple[object, ...]:
    if key not in KEYS:
        known = [*KEYS, *keys_of("search")]
        near = nearest(key, known)
        fix = f"search.{near}" if near else None
        raise form.wrong(f"unknown key {key!r}", None, f"search.{key}", ", ".join(known), fix)
    if not isinstance(values, list | tuple) or not values:
        usual = getattr(_SECTIONS[KEYS[key]], key, None)
        meant = values if values and _is_value(key, values, form) else 1 if usual is None else usual
        fix = f"{key} = {toml_value([meant])}"
        raise form.wrong(f"{values!r} is no list of values to try", None, f"search.{key}", "a list", fix)
    out = [_value(key, values, i, form) for i in range(len(values))]
    return tuple(v for i, v in enumerate(out) if v not in out[:i])


def _value(key: str, values: Sequence[object], i: int, form: FileErrors) -> object:
    """The i-th of a list as its section holds it. A fix of it is the list with it mended."""
    try:
        value = getattr(typed({key: values[i]}, _SECTIONS[KEYS[key]], form, None, "search"), key)
        if key == "name" and value is None:
            raise form.wrong("no name", None, "", ", ".join(NAMES), NAMES[0])
        if key == "name":
            return scheduled(value, "search.name")
        if key == "layers" and isinstance(value, str) and value not in _LAYERS:
            fix = nearest(value, _LAYERS)
            raise form.wrong(f"unknown layers {value!r}", None, "", f"{', '.join(_LAYERS)}, or counts of layers", fix)
        if key == "order":
            _ = JobParallel(order=value).mesh  # refuses what does not name each axis once
    except PiperError as e:
        text, fix = (e.suggestion or "").removeprefix(f"search.{key} = "), None
        if isinstance(values[i], int) and _is_value(key, values, form):  # [4, 4] is one value where [[4, 4]] is meant
            fix = f"{key} = {toml_value([values])}"
        elif text and not isinstance(values[i], list | tuple):
            mended = text if text != e.suggestion else toml_value(text)
            fix = f"{key} = [{', '.join(mended if k == i else toml_value(v) for k, v in enumerate(values))}]"
        raise form.wrong(e.message, None, f"search.{key}", e.allowed, fix) from None
    return value


def _is_value(key: str, value: object, form: FileErrors) -> bool:
    try:
        typed({key: value}, _SECTIONS[KEYS[key]], form, None, "search")
    except PiperError:
        return False
    return True


def scheduled(name: str, key: str) -> str:
    """A schedule's name as it is known here. Raises PiperError (job): there is none of that name."""
    try:
        return canonical(name)
    except PiperError as e:
        raise job_error(key, e.message, e.suggestion, e.allowed) from None

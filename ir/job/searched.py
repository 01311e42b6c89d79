"""The lists of `[search]`: which keys may vary, every value checked as the key's own section would."""

from collections.abc import Mapping
from dataclasses import fields, replace

from ir.core.errors import ErrorKind, PiperError, nearest
from ir.core.files import FileErrors, typed
from ir.job.schema import JobParallel, JobSchedule, JobSearch, ModelSection
from ir.schedules.registry import canonical

_FIXED = ("directives", "builder", "csv", "microbatches", "global_batch")
KEYS: Mapping[str, str] = {
    **{f.name: "parallel" for f in fields(JobParallel)},
    **{f.name: "schedule" for f in fields(JobSchedule) if f.name not in _FIXED},
    "attention": "model",
}
_SECTIONS: Mapping[str, type] = {"parallel": JobParallel, "schedule": JobSchedule, "model": ModelSection}


def tried(search: JobSearch, form: FileErrors) -> JobSearch:
    """With every listed value as its section holds it.

    Raises PiperError (job): a key that cannot vary, a list without a value, a value that the key does not take, or a
    key both listed and pinned.
    """
    found = {key: _values(key, values, form) for key, values in search.overrides.items()}
    for key in search.pin:
        _check_key(key, f"pinned is {key!r}, which nothing varies", form)
        if key in found:
            raise form.wrong(f"{key} is listed and pinned", None, "search.pin", "one of the two", f"leave out {key}")
    return replace(search, overrides=found)


def _values(key: str, values: object, form: FileErrors) -> tuple[object, ...]:
    _check_key(key, f"unknown key {key!r}", form)
    if not isinstance(values, list | tuple) or not values:
        raise form.wrong(f"{values!r} is no list of values to try", None, f"search.{key}", "a list", f"{key} = [1, 2]")
    cls = _SECTIONS[KEYS[key]]
    out = [getattr(typed({key: v}, cls, form, None, "search"), key) for v in values]
    if key == "name":
        out = [scheduled(str(name), "search.name") for name in out]
    return tuple(v for i, v in enumerate(out) if v not in out[:i])


def _check_key(key: str, said: str, form: FileErrors) -> None:
    if key not in KEYS:
        near = nearest(key, KEYS)
        raise form.wrong(said, None, f"search.{key}", ", ".join(KEYS), f"search.{near}" if near else None)


def scheduled(name: str, key: str) -> str:
    """A schedule's name as it is known here. Raises PiperError (job): there is none of that name."""
    try:
        return canonical(name)
    except PiperError as e:
        raise PiperError(ErrorKind.JOB, e.message, key=key, allowed=e.allowed, suggestion=e.suggestion) from None

"""Where a path that a job names starts: at the folder of the job's file. One that a flag names starts where one is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def named_path(file: str, name: str, presets: Collection[str] = ()) -> str:
    """The path that `name` stands for in a job read from `file`; a preset's name, or a word like one, as it is.

    Without presets every name is a path.

    >>> named_path("jobs/a.toml", "counts.csv"), named_path("jobs/a.toml", "/data/counts.csv")
    ('jobs/counts.csv', '/data/counts.csv')
    >>> named_path("jobs/a.toml", "h800-sxm", ["h800-sxm"]), named_path("jobs/a.toml", "../my.json", ["h800-sxm"])
    ('h800-sxm', 'jobs/../my.json')
    """
    path = Path(file).parent / name
    if not presets:
        return str(path)
    is_path = name.endswith(".json") or "/" in name or name == "." or (name not in presets and path.is_dir())
    return str(path) if is_path and name not in presets else name

"""What the casts of fp8 move, by the recipe that scales. Data in casts.toml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

from ir.core.errors import ErrorKind
from ir.core.files import FileErrors, read_toml, typed, words

FORM = FileErrors("a table of casts", ErrorKind.JOB, "cluster.fp8_recipe", 10**5, "cost_models/software")
Fp8Recipe = Annotated[str, words("blocks", "tensor", "mxfp8", said="fp8 recipe")]


@cache
def fp8_casts() -> dict[str, dict[str, float]]:
    """Recipe -> end of a cast's label -> bytes it moves over those of DeepSeek's.

    >>> {name: casts.get("transpose", 1.0) for name, casts in fp8_casts().items()}
    {'blocks': 1.0, 'tensor': 0.0, 'mxfp8': 0.0}
    """
    path = Path(__file__).with_name("casts.toml")
    return typed(read_toml(path, FORM), dict[str, dict[str, float]], FORM, str(path))

"""What was trained of a model with adapters, as peft saves those of one name: for `PeftModel.from_pretrained`."""

import re
from pathlib import Path

from executor.checkpoint.hub import new_folder, stored
from executor.checkpoint.manifest import CheckpointManifest
from executor.checkpoint.tensors import write_tensors
from executor.modules.base import TORCH
from ir.core.errors import ErrorKind, PiperError
from ir.core.work import DType

FILE = "adapter_model.safetensors"
_FACTOR = re.compile(r"(.+\.lora_\w+)\.([^.]+)(\.\w+)?")  # where, the adapter's name, what of it
_COPY = re.compile(r"(.+)\.modules_to_save\.([^.]+)(\..+)")  # trained in another's place


def write_adapter(folder: Path, manifest: CheckpointManifest, out: Path, dtype: DType) -> list[str]:
    """Write a checkpoint's parameters to a new folder under peft's names; the names of what was written.

    Raises PiperError (usage): something is trained that is no adapter's, or adapters of two names are. (io): `out`
    holds something, or cannot be written.
    """
    named = {name: _named(name) for name in manifest.training.shapes}
    if stray := next((name for name, found in named.items() if found is None), None):
        message, allowed = f"{stray} was trained, and is no adapter's", "checkpoints of peft's adapters (lora_…) alone"
        raise PiperError(ErrorKind.USAGE, message, key="--adapter", allowed=allowed, suggestion=f"--hub {out}")
    saved = {name: found for name, found in named.items() if found is not None}
    if len(adapters := dict.fromkeys(adapter for _, adapter in saved.values())) > 1:
        message = f"adapters of several names were trained: {', '.join(adapters)}"
        raise PiperError(ErrorKind.USAGE, message, key="--adapter", allowed="one", suggestion=f"--hub {out}")
    with new_folder(out, "--adapter"):
        write_tensors(out / FILE, {saved[n][0]: t for n, t in stored(folder, manifest, saved, TORCH[dtype])})
    return [FILE]


def _named(name: str) -> tuple[str, str] | None:
    """(what peft's file calls a parameter, its adapter's name); None: it is no adapter's.

    >>> _named("base_model.model.layers.0.q_proj.lora_A.default.weight")
    ('base_model.model.layers.0.q_proj.lora_A.weight', 'default')
    >>> _named("base_model.model.lm_head.modules_to_save.default.weight")
    ('base_model.model.lm_head.weight', 'default')
    """
    if (found := _COPY.fullmatch(name) or _FACTOR.fullmatch(name)) is None:
        return None
    at, adapter, leaf = found.groups(default="")
    return at + ("" if at.endswith(".lora_magnitude_vector") else leaf), adapter

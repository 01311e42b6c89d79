"""A checkpoint as the Hub has it: safetensors under the names that transformers saves, an index, and config.json."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.checkpoint.manifest import BUFFERS, CheckpointManifest
from executor.checkpoint.reader import CheckpointReader
from executor.checkpoint.tensors import write_tensors
from executor.modules.base import TORCH
from executor.modules.hub_weights import INDEX, WHOLE, HubCheckpoint, StoredParam, biases
from executor.parallel.shares import ParamShard
from ir.core.errors import ErrorKind, PiperError
from ir.core.work import DType
from ir.job.table import keys_of
from ir.workload.config.load import raw_config

MOST = 2**30  # bytes of a file, one parameter at least


def write_hub(folder: Path, manifest: CheckpointManifest, out: Path, dtype: DType, most: int = MOST) -> list[str]:
    """Write a checkpoint's weights to a new folder, one file at a time in memory; the names of what was written.

    A captured module's go out under its own names. Raises PiperError (io): `out` holds something, or cannot be written;
    a value is missing. (usage): routers' corrections that are not where training took them from.
    """
    files, config = _files(manifest, TORCH[dtype].itemsize, most), _config(manifest, dtype)
    with new_folder(out, "--hub"):
        count = len(files)
        names = [f"model-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)] if count > 1 else [WHOLE]
        index, size = dict[str, str](), 0
        for name, params in zip(names, files, strict=True):
            tensors = dict(stored(folder, manifest, params, TORCH[dtype]))
            tensors |= _buffers(manifest) if name == names[count - 1] else {}
            index |= dict.fromkeys(tensors, name)
            size += sum(t.nbytes for t in tensors.values())
            write_tensors(out / name, tensors)
        if count > 1:
            _write(out / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
            names.append(INDEX)
        if config:
            _write(out / "config.json", config)
            names.append("config.json")
    return names


@contextmanager
def new_folder(out: Path, key: str) -> Iterator[None]:
    """A folder is made, and written to. Raises PiperError (io): it holds something, or cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if found := next(out.iterdir(), None):
            message = f"{out} is not empty: {found.name} lies there"
            raise PiperError(ErrorKind.IO, message, file=str(out), key=key, allowed="a new folder")
        yield
    except OSError as error:
        raise PiperError(ErrorKind.IO, f"cannot write: {error.strerror}", file=str(out), key=key) from error


def _files(manifest: CheckpointManifest, size: int, most: int) -> list[list[str]]:
    """Parameters by file, in order."""
    out: list[list[str]] = [[]]
    room = most
    for name, shape in manifest.training.shapes.items():
        if (need := prod(shape) * size) > room and out[-1]:
            out.append([])
            room = most
        out[-1].append(name)
        room -= need
    return out


def stored(
    folder: Path, manifest: CheckpointManifest, names: Iterable[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of these as files have it, one at a time; a module's own under their names."""
    reader, shapes, model = CheckpointReader(folder, manifest), manifest.training.shapes, manifest.training.model
    for name in names:
        value = reader.whole("weight", name).to(dtype)
        own = manifest.job.get("model", {}).get("module") is not None
        at = StoredParam(((name,),)) if own else StoredParam.of(name, shapes[name], str(model.get("model_type")))
        for e, parts in enumerate(at.names):
            whole = value[e] if at.stacked else value
            yield from zip(parts, whole.chunk(len(parts)) if len(parts) > 1 else [whole], strict=True)
    for name, shape in biases({n: shapes[n] for n in names}, (model.get("moe") or {}).get("scoring")).items():
        yield name, _bias(manifest, name, shape)


def _bias(manifest: CheckpointManifest, name: str, shape: tuple[int, ...]) -> Tensor:
    """A router's correction: no gradient trained it, so it is where training took it from, or zero."""
    found = _read_from(manifest, name)
    return torch.zeros(shape, device="cpu") if found is None else found.read(name, ParamShard(shape), torch.float32)


def _buffers(manifest: CheckpointManifest) -> dict[str, Tensor]:
    """Those of a module that training read beside its parameters, as they were stored."""
    if (was := manifest.training.model.get(BUFFERS)) is None or (found := _read_from(manifest, "a buffer")) is None:
        return {}
    names = found.beside(manifest.training.shapes)
    if found.digest(names) != was:
        message, allowed = f"the buffers in {found.path} are not those that were read", "the files of the training"
        raise PiperError(ErrorKind.USAGE, message, key="model.weights", allowed=allowed)
    return {n: found.tensor(n) for n in names}


def _read_from(manifest: CheckpointManifest, what: str) -> HubCheckpoint | None:
    """The files that training started from, if it started from any."""
    model = manifest.job.get("model", {})
    if (path := model.get("weights")) is None:
        return None
    if not Path(path).exists():
        message = f"{what} was read from {path}, which is not here"
        raise PiperError(ErrorKind.USAGE, message, key="model.weights", allowed=f"{path}, seen from this folder")
    return HubCheckpoint(Path(path), tuple(model.get("drawn", ())))


def _config(manifest: CheckpointManifest, dtype: DType) -> Mapping[str, Any]:
    """The Hugging Face config that the job had; nothing for a captured module.

    Raises PiperError: its file is not here, of a checkpoint that does not have what stood in it.
    """
    model = manifest.job.get("model", {})
    inline = {k: v for k, v in model.items() if k not in keys_of("model")}
    raw = manifest.job.get("config.json") or (raw_config(model["config"]) if model.get("config") else {})
    found = {k: v for k, v in (raw | inline).items() if k != "quantization_config"}
    return found and found | {"dtype": str(TORCH[dtype]).removeprefix("torch.")}


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

"""What `[model] module = "my_model.py:build"` refers to, and what it makes under a seed: the same on every rank."""

import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from executor.device.device import threads
from executor.device.valueless import ValuelessModel
from executor.modules.base import TRACING
from executor.modules.hub_weights import HubCheckpoint
from executor.modules.user.annotate import model_error
from executor.modules.user.purity import built, host_seeded
from executor.modules.user.trainable import checked_module
from ir.core.errors import ErrorKind, PiperError, nearest
from ir.core.files import run_file

SEEDED = "values that torch, numpy and random draw, which model.seed has seeded"


def load_callable(reference: str, seed: int = 0) -> Callable[..., object]:
    """What `path/file.py:name` refers to. Runs that file: only ever one the user named.

    It runs without arguments, and draws from the seed.

    Raises PiperError (model): not `file.py:name`, no such callable, or the file fails; (io): no such file.

    >>> load_callable("nowhere.py:build")
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: nowhere.py: no such file
    """
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if not path or not name:
        raise PiperError(ErrorKind.MODEL, f"not a callable: {reference!r}", key="model.module", allowed="file.py:name")
    if not file.is_file():
        raise PiperError(ErrorKind.IO, "no such file", file=path)
    # Packages that put another module in their own place are not to be imported by two threads at once.
    alone = patch.object(sys, "argv", [str(file)])  # this process's arguments are not for it
    with TRACING, torch.random.fork_rng(devices=[]), host_seeded(seed), alone, threads(1):
        torch.manual_seed(seed)
        try:
            module = run_file(f"piper_user_{file.stem}", file)
        except (Exception, SystemExit) as error:
            raise _failed(file, error) from error
    if not callable(found := getattr(module, name, None)):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        fix = nearest(name, known)
        raise PiperError(ErrorKind.MODEL, f"no callable {name!r}", file=path, allowed=known, suggestion=fix)
    return cast(Callable[..., object], found)


def _failed(file: Path, error: BaseException) -> PiperError:
    """Said of the user's last line that it came from."""
    lines = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == file.parent]
    at = f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else file.name
    message = f"{file.name} cannot be run: {type(error).__name__}: {str(error)[:200]}"
    if not isinstance(error, SyntaxError):  # which says itself where
        message += f" ({at})"
    allowed = "a file that Python runs as it stands, without arguments, and what it imports"
    return model_error(message, f"see that `python {file}` ends without an error", allowed, "model.module")


class UserModelBuild:
    """build(), and checksums of what its last call has made; of what is without values, none."""

    def __init__(self, build: Callable[[], object]) -> None:
        self.build = build
        self.drawn: Mapping[str, int] = {}

    def __call__(self) -> object:
        with threads(1):  # as ranks have it
            made = self.build()
        self.drawn = checksums(made) if isinstance(made, nn.Module) else {}
        return made


def checksums(module: nn.Module) -> Mapping[str, int]:
    """Of its parameters and buffers that have values.

    >>> list(checksums(nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    held = [*module.named_parameters(), *module.named_buffers()]
    return {name: _checksum(t.detach()) for name, t in held if type(t.data) is Tensor and _is_plain(t)}


def _is_plain(t: Tensor) -> bool:
    return t.device.type == "cpu" and t.layout is torch.strided and not t.is_quantized


def _checksum(t: Tensor) -> int:
    plain = t.resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(plain.flatten().view(torch.uint8).numpy().data)


def refuse_other_values(first: Mapping[str, int], found: Mapping[str, int]) -> None:
    """Raise PiperError (model): a rank's build() has made other values than the one before all ranks' has.

    >>> refuse_other_values({"w": 1}, {"w": 1})
    """
    odd = next((n for n in first if n in found and first[n] != found[n]), None)
    if odd is not None:
        message = f"build() makes other values of {odd} each time, and ranks would train different models"
        fix = "draw them behind torch's own generator, without a seed from the clock or the system"
        raise model_error(message, fix, SEEDED, "model.module")


def made_by(build: object, seed: int, making: Callable[[], AbstractContextManager[Any]] = nullcontext) -> nn.Module:
    """What build() makes under a seed, whatever was drawn before."""
    assert callable(build)
    with TRACING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with host_seeded(seed), making():
            return checked_module(built(build))


def valueless(build: object, seed: int, files: HubCheckpoint) -> tuple[nn.Module, ValuelessModel]:
    """The same without values, but for trained parameters that the files lack and need not have: these are drawn by a
    second build(), when their names are known.
    """
    blank = ValuelessModel()
    module = made_by(build, seed, blank.building)
    lacks = _drawn(module, files)
    if lacks:
        blank = ValuelessModel(blank.registered(module, lacks))
        module = made_by(build, seed, blank.building)
        params = dict(module.named_parameters())
        if odd := next((n for n in lacks if n not in params or blank.without(params[n])), None):
            message = f"build() makes {odd} of the values of others, or otherwise each time"
            allowed, fix = "parameters that are drawn by themselves", "draw it in the module that has it"
            raise model_error(message, fix, allowed, "model.drawn")
    return module, blank


def _drawn(module: nn.Module, files: HubCheckpoint) -> list[str]:
    """Trained parameters that files lack and need not have."""
    return [n for n, p in module.named_parameters() if p.requires_grad and files.lacks(n, tuple(p.shape))]

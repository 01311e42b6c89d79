"""The whole forward of a user's module by torch.export, or why there is none, with the user's line."""

import linecache
import traceback
from contextlib import suppress
from inspect import Parameter, signature
from keyword import iskeyword
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.fx import config

from executor.modules.user.annotate import model_error
from executor.modules.user.exports.shared_exports import shared_exports
from executor.modules.user.exports.watched import Assigned, forward_watched, register
from executor.modules.user.rewrites.own_functions import call_functions, functions_kept, is_own
from ir.core.errors import PiperError

NAMED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[3]))
ALLOWED = "a forward (ids) → logits whose shapes and branches depend on sizes alone"
BRANCHES = "branch on sizes, not on values; experts by a loop over those chosen do so, too"
FIXES = {  # by what torch says
    "register a pytree": "torch.export.register_dataclass of it, or a dict or tuple",
    "fake tensor": "keep in the module what a call leaves for others, not beside it (lru_cache, a dict of the file)",
}


def export_whole(module: nn.Module, size: int, length: int) -> tuple[fx.GraphModule, list[Assigned]]:
    """The whole forward as one graph, with the user's functions in it; numbers that it assigned. Raises PiperError
    (model): torch does not export it.

    What calls no Python of the user's and assigns nothing, another rank's export gives as well.
    """
    known, of = shared_exports(), (size, length)
    if known is not None and (taken := known.take(module, of)) is not None:
        return taken, []
    root, assigned = _watched(module, size, length)
    if known is not None and not assigned and not any(map(is_own, root.graph.nodes)):
        known.put(module, of, root)
    return root, assigned


def _watched(module: nn.Module, size: int, length: int) -> tuple[fx.GraphModule, list[Assigned]]:
    failure, root = None, None
    with functions_kept() as calls, forward_watched(module) as (assigned, unregistered):
        try:
            root = _exported(module, size, length)
        except PiperError as error:
            failure = error
    if unregistered:  # buffers are what torch.export knows
        register(unregistered)
        return _watched(module, size, length)
    if root is None:
        raise failure or AssertionError
    call_functions(root.graph, calls)
    return root, assigned


def export_again(module: nn.Module, size: int, length: int) -> tuple[fx.GraphModule, list[Assigned]] | None:
    """The graph of a second call; None where that fails, as what a first one has kept may be gone."""
    with suppress(PiperError):
        return _watched(module, size, length)
    return None


def _exported(module: nn.Module, size: int, length: int) -> fx.GraphModule:
    """The whole forward as one graph, with the module's own parameters. No caches: they are for generating text."""
    _check_inputs(module)
    ids = torch.zeros(size, length, dtype=torch.int64, device="cpu")
    try:
        # Nobody asks a node which lines of Python made it, and to look them up is a quarter of an export.
        with patch.object(config, "do_not_emit_stack_traces", True, create=True):
            return torch.export.export(module, (ids,), options(module), strict=False).module(check_guards=False)
    except PiperError:
        raise
    except Exception as error:  # of torch.export, of dynamo, of the user's code: of any kind
        raise _not_exported(module, error) from error


def options(module: nn.Module) -> dict[str, Any]:
    """What forward is given beside the ids. One that hands on whatever it is given (peft's) is asked for those inside.

    >>> options(nn.Linear(1, 1))
    {}
    """
    of = signature(module.forward).parameters
    hands_on = any(p.kind is p.VAR_KEYWORD for p in of.values())
    asked = module.modules() if hands_on else (module,)
    return {"use_cache": False} if any("use_cache" in signature(m.forward).parameters for m in asked) else {}


def _check_inputs(module: nn.Module) -> None:
    needed = [n for n, p in signature(module.forward).parameters.items() if p.default is p.empty and p.kind in NAMED]
    if more := needed[1:]:
        message = f"the forward of {type(module).__name__} needs {', '.join(more)} beside the token ids"
        raise model_error(message, f"{more[0]} = None, made in forward then", ALLOWED, "model.module")


def _not_exported(module: nn.Module, error: Exception) -> PiperError:
    """What torch says, and the last line on the way there that is the user's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*OWN, "<"))]
    where = ""
    if frames:
        last = frames[-1]
        where = f" at {last.filename}:{last.lineno}: {linecache.getline(last.filename, last.lineno or 0).strip()}"
    said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    message = f"{type(module).__name__} cannot be exported{where} ({type(error).__name__}: {said.strip()[:200]})"
    fix = next((fix for word, fix in FIXES.items() if word in said), BRANCHES)
    names = (n for n, _ in module.named_modules() if any(map(iskeyword, n.split("."))))
    if isinstance(error, SyntaxError) and (name := next(names, None)):  # torch.fx writes paths down as code
        fix = f"another name than {name}, which is a word of Python's"
    return model_error(message, fix, ALLOWED, "model.module")

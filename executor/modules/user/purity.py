"""What a user's forward may not do, since plans would differ by it: draw numbers, write buffers, remember.

A plan runs a chunk once per microbatch, on some rank, in some order; under recompute it runs it again. So the result
may depend on parameters and inputs alone. Forward is run twice without values and watched, op by op.
"""

import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    is_fake,
)
from torch.utils._pytree import tree_leaves

from executor.device.memory import OpWatch, named, overwritten, tensors_of
from executor.modules.remade import outputs
from executor.modules.user.annotate import model_error
from ir.core.errors import PiperError

Call = tuple[object, ...]
ChunkCall = Callable[[str, nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]
UNCHANGED = vars(torch.jit)["optimized_execution"]  # what TorchScript has compiled makes other calls the second time
LITERAL = torch.ops.aten.lift_fresh_copy.default
WITHOUT_VALUES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, UnsupportedFakeTensorException)


@contextmanager
def host_seeded(seed: int) -> Iterator[None]:
    """Inside, Python's and numpy's own generators start from the seed; behind it, they go on as if nothing had been."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def built(build: Callable[[], object]) -> object:
    """Raises PiperError (model): it fails, or asks for values where tensors have none, as in a capture."""
    try:
        return build()
    except PiperError:
        raise
    except DataDependentOutputException as error:
        message = f"build() asks for values ({error}), and it is captured without any"
        fix = "orthogonal(…, use_trivialization=False), say; or piper_sim.capture(build(), …), and model.graph"
        raise model_error(message, fix, "a build() that goes by sizes alone", "model.module") from error
    except (Exception, SystemExit) as error:
        ours, fix = str(Path(__file__).parents[2]), None
        lines = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
        at = f" ({Path(lines[0].filename).name}:{lines[0].lineno})" if lines else ""
        if "FakeTensor" in str(error):
            fix = "the class from its config, and model.weights = the folder, for what from_pretrained reads"
        message = f"build() failed: {type(error).__name__}: {str(error)[:200]}{at}"
        raise model_error(message, fix, "a function that returns a torch.nn.Module", "model.module") from error


def refuse_impure(name: str, unit: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run a chunk twice on inputs without values; returns its outputs, for the next.

    Raises PiperError (model): it draws random numbers, writes a buffer or a parameter, reads what it computed in an
    earlier call, or makes other calls the second time.
    """
    return outputs(_twice(_Watch(name, unit), lambda: unit(*inputs), inputs))


def refuse_memory(
    module: nn.Module, forward: Callable[[Tensor], Tensor], ids: Tensor, backward: bool = False, draws: bool = True
) -> None:
    """The same of a forward that is to be exported, whose graph has one call of it for ever; there it may draw.
    backward: of its backward, too, which plans call in another order each. draws: that may draw, as it runs a forward
    that drops out again.

    Raises PiperError (model). What cannot be run without values is not watched.
    """
    watch = _Watch("forward", module, draws=True)
    params = [p for p in module.parameters() if p.requires_grad]
    with suppress(*WITHOUT_VALUES), FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        given = mode.from_tensor(ids)  # whose views are known by their storage
        _twice(watch, lambda: forward(given), (given,))
        if backward:
            watch = _Watch("backward", module, draws=draws)
            _twice(watch, lambda: torch.autograd.grad(forward(given).sum(), params, allow_unused=True), (given,))


def refuse_unlike(plain: Callable[[], Tensor], found: Callable[[], Tensor], what: str, fix: str) -> None:
    """Hold what a run computes against what the user's own code makes of the same values.

    Raises PiperError (model): they are far apart. Code that fails here is not asked.
    """
    wanted = made = torch.zeros(())
    with suppress(Exception), torch.enable_grad():
        wanted, made = plain().detach(), found().detach()
    if is_fake(wanted):  # the code keeps for all calls what an export, which has no values, has made
        return
    near = float(wanted.nan_to_num().abs().max()) * torch.finfo(wanted.dtype).eps ** 0.5
    if wanted.shape != made.shape or not torch.allclose(made, wanted, rtol=0.0, atol=near, equal_nan=True):
        message = f"{what} makes something else than the module's own forward"
        raise model_error(message, fix, "the same results", "model.module")


def _twice(watch: "_Watch", call: Callable[[], object], inputs: tuple[Tensor, ...]) -> object:
    calls: list[list[Call]] = []
    found, name = None, watch.name
    for _ in range(2):
        before = (random.getstate(), numpy_state())
        watch.begin(inputs)
        with watch, UNCHANGED(False):
            found = call()
        if before != (random.getstate(), numpy_state()):
            raise _impure(name, "draws random numbers on the host", "Python's random or numpy.random in forward")
        calls.append(watch.calls)
    first, second = calls
    if first != second:
        at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
        one = first[at][0] if at < len(first) else "nothing"
        raise _impure(name, f"does not do the same twice (from {one} on)", "values of the clock, the host or a counter")
    return found


def unreached(forward: Callable[[], tuple[Tensor, ...]], module: nn.Module) -> frozenset[int]:
    """Parameters, by id, that no gradient of what forward gives reaches; none where backward needs values."""
    params = [p for p in module.parameters() if p.requires_grad]
    with suppress(*WITHOUT_VALUES), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        last = [x.sum() for x in forward() if x.requires_grad]
        found = torch.autograd.grad(last, params, allow_unused=True) if last else [None] * len(params)
        return frozenset(id(p) for p, grad in zip(params, found, strict=True) if grad is None)
    return frozenset()


def without_values(convert: Callable[[], object]) -> None:
    """Do something under a fake mode that takes real parameters as they are.

    Raises PiperError (model): what a user's forward raises.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            convert()
    except WITHOUT_VALUES as error:
        message = f"forward failed without values: {type(error).__name__}: {error}"
        raise model_error(message, "run the module on a small batch first", key="model.module") from error


class _Watch(OpWatch):
    """Every op of a forward, and where the tensors it reads come from."""

    def __init__(self, name: str, unit: nn.Module, *, draws: bool = False) -> None:
        super().__init__()
        self.name, self.draws = name, draws
        beside = {n: t for m in unit.modules() for n, t in vars(m).items() if isinstance(t, Tensor)}
        held = {**beside, **dict(unit.named_parameters()), **dict(unit.named_buffers())}
        self.held = {id(t.untyped_storage()): n for n, t in held.items()}
        self.views: list[Any] = []  # held, so that no other storage gets their numbers
        self.calls: list[Call] = []
        self.constants: list[Call] = []
        self.values: dict[int, Any] = {}  # storages of this call that depend on inputs or parameters
        self.past: dict[int, Any] = {}  # those of the call before

    def begin(self, inputs: tuple[Tensor, ...]) -> None:
        self.calls, self.past = [], self.values
        self.values = {id(s): s for s in (t.untyped_storage() for t in inputs)}
        self.past = {k: s for k, s in self.past.items() if k not in self.values}

    def called(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        if func.namespace == "profiler":  # `record_function` computes nothing
            return func(*args, **given)
        self._refuse_random(func, args, given)
        read = [t for t in tree_leaves((args, given)) if isinstance(t, Tensor)]
        stores = [id(t.untyped_storage()) for t in read]
        if func._schema.is_mutable:
            self._refuse_writes(func, args, given)
        if any(s in self.past and s not in self.held for s in stores):
            raise _impure(self.name, f"reads what an earlier call computed ({func})", "state kept between microbatches")
        out = func(*args, **given)
        scalars = [x for x in tree_leaves((args, given)) if not isinstance(x, Tensor)]
        call: Call = (str(func), *(repr(x) for x in scalars), *(tuple(t.shape) for t in read))
        # Without values, each copy of a number written in forward has one storage, as a view has.
        views = func is LITERAL or any(r.alias_info is not None for r in func._schema.returns)
        if views and stores and stores[0] in self.held:  # without values, a parameter's view has a storage of its own
            named = self.held[stores[0]]
            self.views += [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)]
            self.held.update({id(t.untyped_storage()): named for t in tree_leaves(out) if isinstance(t, Tensor)})
        if any(s in self.values or s in self.held for s in stores):
            self.calls.append(call)
            for t in tree_leaves(out):
                if isinstance(t, Tensor) and id(t.untyped_storage()) not in self.held:
                    self.values[id(t.untyped_storage())] = t.untyped_storage()
        elif call not in self.constants:  # made of sizes alone: it may be kept from an earlier call, but not change
            self.constants.append(call)
            if self.past:
                raise _impure(self.name, f"does not do the same twice ({func})", "values of the clock or the host")
        return out

    def _refuse_random(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.draws or torch.Tag.nondeterministic_seeded not in func.tags:
            return
        attention = any(a.name == "dropout_p" for a in func._schema.arguments)
        if attention and not named(func, args, kwargs).get("dropout_p"):  # which draws only where it drops out
            return
        raise _impure(self.name, f"draws random numbers ({func})", "dropout and noise in forward")

    def _refuse_writes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for t in tensors_of(overwritten(func, args, kwargs)):
            if (found := self.held.get(id(t.untyped_storage()))) is not None:
                raise _impure(self.name, f"writes {found} in forward ({func})", "buffers as state")


def numpy_state() -> tuple[object, ...]:
    """Of its own generator, to be compared."""
    kind, keys, *rest = np.random.get_state()
    return (kind, np.asarray(keys).tobytes(), *rest)


def _impure(name: str, what: str, source: str) -> PiperError:
    message = f"{name} {what}: {source} would give every plan another result"
    fix = "leave it out of forward; constants made of sizes alone may be kept"
    return model_error(message, fix, "forwards that depend on parameters and inputs alone", "model.module")

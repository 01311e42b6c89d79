"""The values that files give a user's module, as far as a rank holds it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from executor.modules.hub_weights import HubCheckpoint
from executor.parallel.shares import ParamShard
from ir.core.errors import job_error


@dataclass(frozen=True)
class UserModelWeights:
    """Files, and what of a module they have. names: of its tensors, by id. params, buffers: whole shapes, by name.
    shares: what a rank holds of a parameter, where that is not all of it. drawn: those that files lack, and need not
    have. frozen: those that nobody trains.
    """

    files: HubCheckpoint
    names: Mapping[int, str]
    params: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    shares: Mapping[str, ParamShard]
    drawn: Collection[str] = ()
    frozen: Collection[str] = ()

    def check(self) -> None:
        """Raise PiperError (io): the files have other tensors than its parameters and the buffers that are saved.

        (job): what is to be drawn is frozen.
        """
        if lost := next((n for n in self.frozen if self.files.lacks(n, self.params[n])), None):
            message = f"{lost} is in no file, and is frozen: what a run draws is kept by what it trains alone"
            raise job_error("model.drawn", message, "files that have it", "patterns of names of trained parameters")
        self.files.check(self.params, self.buffers)

    def fill(self, *parts: nn.Module) -> None:
        """Read what these have. Raises PiperError (io)."""
        held: dict[int, Tensor] = {id(t): t for m in parts for t in (*m.parameters(), *m.buffers())}
        for name, t in ((self.names[i], t) for i, t in held.items() if i in self.names):
            if name in self.drawn:
                continue
            share = self.shares.get(name, ParamShard(self.params.get(name, tuple(t.shape)), ()))
            t.data.copy_(self.files.read(name, share, t.dtype))


def saved_buffers(module: nn.Module, files: HubCheckpoint) -> dict[int, str]:
    """Names of the buffers that files have, by id. Indices and masks may be missing, then as they were made."""
    saved = module.state_dict(keep_vars=True)
    found = {n: t for n, t in module.named_buffers() if n in saved}
    return {id(t): n for n, t in found.items() if t.is_floating_point() or n in files}

"""Operators' Python objects are made once, whichever threads ask for them: torch frees all but the last."""

from functools import cache

import pytest

from tests.executor.launch.processes import forked

# Four threads under a mode ask for an operator that importing torch does not; each that makes its object waits for one
# more to do so.
ASKED = """
import threading, torch
from executor.device import memory
from torch._ops import OpOverload
made, second, start, init = [], threading.Event(), threading.Barrier(4), OpOverload.__init__

def making(self, *args, **kwargs):
    init(self, *args, **kwargs)
    if str(self) == "aten.promote_types.default":
        made.append(self)
        if len(made) > 1:
            second.set()
        if threading.current_thread() is not threading.main_thread():
            second.wait(1.0)

def ask():
    start.wait()
    with memory.PeakMemory():
        torch.promote_types(torch.float32, torch.float64)

OpOverload.__init__ = making
{control}
threads = [threading.Thread(target=ask) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
print(len(made))
"""


ONCE = {"": True, "memory.resolve_operators = lambda: None": False}


@cache
def _asked() -> dict[str, tuple[int, str]]:
    programs = (ASKED.format(control=control) for control in ONCE)
    return dict(zip(ONCE, forked("import torch; from executor.device import memory", *programs), strict=True))


@pytest.mark.parametrize("control", ONCE)
def test_threads_that_ask_together_are_given_the_same(control: str) -> None:
    code, said = _asked()[control]
    assert code == 0 and (int(said) == 1) is ONCE[control]

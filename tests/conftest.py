"""Options of all tests: how many examples properties draw, golden files, and what CI may skip.

PIPER_EXAMPLES=2000 draws that many instead of the few that a quick run takes. --update-golden writes golden files anew.
Where CI is set, a test that is skipped fails, unless only a machine with a GPU, or one without, could run it.
"""

import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    max_examples=int(os.environ.get("PIPER_EXAMPLES", "60")),
    deadline=None,
    # CI draws the same examples every time, so that a red run there can be run again here; elsewhere they are fresh.
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("ci")
# Shells start what runs in the background with Ctrl-C ignored, and processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
MAY_SKIP = re.compile(r"needs a (machine without a )?GPU$")


def unexcused(reason: str, ci: str | None) -> bool:
    """Whether a test must not be skipped for this reason.

    >>> unexcused("Skipped: needs a GPU", "true"), unexcused("could not import 'torch'", "true"), unexcused("x", None)
    (False, True, False)
    """
    return bool(ci) and not MAY_SKIP.search(reason)


def _refuse_skip(report: Any) -> Any:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if report.skipped and not hasattr(report, "wasxfail") and unexcused(reason, os.environ.get("CI")):
        report.outcome, report.longrepr = "failed", f"CI skips nothing: {reason}"
    return report


@pytest.fixture(autouse=True)
def _usual_device() -> Generator[None, None, None]:
    """A rank that a test runs in its own thread makes its device the default, and watches it by torch's modes: not for
    the tests that follow."""
    functions, dispatches = _modes()
    yield
    if (torch := sys.modules.get("torch")) is None:
        return
    if torch.get_default_device() != torch.device("cpu"):
        torch.set_default_device(None)
    while torch._C._len_torch_function_stack() > functions:
        torch._C._pop_torch_function_stack()
    while torch._C._len_torch_dispatch_stack() > dispatches:
        torch._C._pop_torch_dispatch_stack(None)


def _modes() -> tuple[int, int]:
    """How many are on torch's two stacks."""
    if (torch := sys.modules.get("torch")) is None:
        return 0, 0
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What lies here once all modules are imported stays: the collector need not go through it behind every test, and
    comes as seldom as in the processes of `search`."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _refuse_skip((yield))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing with them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the file of that name in `golden/` beside the test."""
    folder = Path(request.path).parent / "golden"

    def check(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--update-golden"):
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no {path}: run pytest --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return check

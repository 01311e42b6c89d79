"""`piper-sim doctor`: is this machine, or this allocation under torchrun, fit to run plans?"""

import argparse
import os
from collections.abc import Generator
from importlib import import_module
from typing import Any

from ir.core.errors import ErrorKind
from piper_sim.app.captured import load_job
from piper_sim.app.commands.output import print_json
from piper_sim.app.doctor.checks import NOT_ON_CPU, DeviceCheck, DeviceCheckColour, examine, questions


def main(args: argparse.Namespace) -> int:
    """Ask until something is red. Returns 0 if nothing is, else 4. Of an allocation's ranks, rank 0 speaks."""
    together, unseen = "WORLD_SIZE" in os.environ and _loads("torch"), list[str]()
    follows = together and os.environ.get("RANK", "0").strip() != "0"
    job = None if args.job is None or follows else load_job(args.job, args.sets)
    asked = questions(job)
    if together:
        from piper_sim.app.doctor import allocation

        if follows:
            return allocation.follow()
        asked, unseen = allocation.asked(job, args.shared), [allocation.NOT_TOGETHER]
    checks = examine(asked, (lambda check: None) if args.json else _show)
    if isinstance(asked, Generator):
        asked.close()
    passed = all(c.colour is DeviceCheckColour.GREEN for c in checks)
    unseen += [] if any(c.found.get("gpus") for c in checks) else list(NOT_ON_CPU)
    unseen += [f"{c.name}: {c.found['undecided']}" for c in checks if "undecided" in c.found]
    if args.json:
        found = [c.object() for c in checks]
        print_json({"schema_version": 1, "passed": passed, "checks": found, "not_checked": unseen})
    else:
        print("\n".join(f"not checked  {what}" for what in unseen))
        print("fit to run plans" if passed else "not fit to run plans")
    return 0 if passed else ErrorKind.RANK_FAILED.exit_code


def _loads(module: str) -> bool:
    """Whether a module can be loaded. Where not, a machine by itself is asked, which says why."""
    try:
        import_module(module)
    except (ImportError, OSError):
        return False
    return True


def _show(check: DeviceCheck) -> None:
    rows: Any = check.found.get("table", [])
    figures = ", ".join(f"{k} {_figure(v)}" for k, v in check.found.items() if k not in ("table", "undecided"))
    print(f"{check.colour:<5}  {check.seconds:6.1f} s  {check.name}{': ' if figures else ''}{figures}", flush=True)
    for row in rows:
        print("       " + "  ".join(f"{k} {_figure(v):<{14 * (k == 'kind')}}" for k, v in row.items()))
    if check.error is not None:
        print(f"       {check.error}", flush=True)


def _figure(value: object) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)

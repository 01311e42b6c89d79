"""`piper-sim doctor`: is this machine, or this allocation under torchrun, fit to run plans?"""

import argparse
import os
from importlib.util import find_spec

from ir.core.errors import ErrorKind
from piper_sim.app.commands.output import print_json
from piper_sim.app.doctor.checks import NOT_ON_CPU, DeviceCheck, DeviceCheckColour, examine, questions


def main(args: argparse.Namespace) -> int:
    """Ask until something is red. Returns 0 if nothing is, else 4. Of an allocation's ranks, rank 0 speaks."""
    together = "WORLD_SIZE" in os.environ and find_spec("torch") is not None
    silent = args.json or int(os.environ.get("RANK", 0)) > 0
    asked = questions()
    if together:
        from piper_sim.app.doctor import allocation

        asked = allocation.asked()
    checks = examine(asked, (lambda check: None) if silent else _show)
    passed = all(c.colour is DeviceCheckColour.GREEN for c in checks)
    unseen = [] if any(c.found.get("gpus") for c in checks) else list(NOT_ON_CPU)
    unseen += [f"{c.name}: {c.found['undecided']}" for c in checks if "undecided" in c.found]
    if args.json:
        found = [c.object() for c in checks]
        print_json({"schema_version": 1, "passed": passed, "checks": found, "not_checked": unseen})
    elif not silent:
        print("\n".join(f"not checked  {what}" for what in unseen))
        print("fit to run plans" if passed else "not fit to run plans")
    return 0 if passed else ErrorKind.RANK_FAILED.exit_code


def _show(check: DeviceCheck) -> None:
    figures = ", ".join(f"{k} {v:.2g}" if isinstance(v, float) else f"{k} {v}" for k, v in check.found.items())
    print(f"{check.colour:<5}  {check.seconds:6.1f} s  {check.name}{': ' if figures else ''}{figures}", flush=True)
    if check.error is not None:
        print(f"       {check.error}", flush=True)

"""`piper-sim import FILE`: a framework's launch as a job."""

from __future__ import annotations

import argparse

from ir.core.errors import printable
from piper_sim.app.commands.output import print_json
from piper_sim.frameworks.importing import import_launch


def main(args: argparse.Namespace) -> int:
    """Print the job: TOML with what was assumed as comments, or the object that holds an entry for each argument."""
    found = import_launch(args.file, args.framework)
    if args.json:
        print_json({"schema_version": 1, **found.to_dict()})
    else:
        print(printable(found.to_toml()), end="")
    return 0

"""`python -m executor.checkpoint DIR`: check a checkpoint, list it, and write it as others have weights or adapters."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from executor.checkpoint.adapter import write_adapter
from executor.checkpoint.folder import newest
from executor.checkpoint.hub import write_hub
from executor.checkpoint.manifest import check_files, read_manifest, verify
from executor.checkpoint.reader import digests
from executor.modules.base import TORCH
from ir.core.errors import PiperError
from ir.core.work import DType


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, or 2 for a checkpoint that is not whole."""
    p = argparse.ArgumentParser(prog="python -m executor.checkpoint", description="Check a checkpoint and list it.")
    p.add_argument("folder", metavar="DIR", help="a folder that --save has written (its newest), or one checkpoint")
    p.add_argument("--hub", metavar="OUT", help="write its weights to a new folder, as transformers saves them")
    p.add_argument("--adapter", metavar="OUT", help="write what was trained to a new folder, as peft saves adapters")
    p.add_argument("--dtype", choices=[*map(str, TORCH)], help="the format of those weights (default: that of updates)")
    args = p.parse_args(list(argv))
    try:
        folder = newest(Path(args.folder))
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        verify(folder, manifest, manifest.files)
        values = digests(folder, manifest)
        form = DType(args.dtype) if args.dtype else manifest.training.format
        made = {"hub": (args.hub, write_hub), "adapter": (args.adapter, write_adapter)}
        wrote = {what: write(folder, manifest, Path(out), form) for what, (out, write) in made.items() if out}
    except PiperError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.kind.exit_code
    out = {"folder": str(folder), "step": manifest.step, "tokens": manifest.tokens, "ranks": manifest.ranks}
    out |= {"model_digest": manifest.model_digest, "plan_digest": manifest.plan_digest}
    out |= {"format": manifest.training.format, "sha256": values}
    print(json.dumps({**out, **wrote}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`piper-sim`: flags to commands, errors to exit codes. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import errno
import json
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NoReturn

from ir.core.errors import ErrorKind, PiperError, nearest
from piper_sim.app.calibrate_flags import calibrate_flags, imports
from piper_sim.app.ending import unwinding
from piper_sim.app.last_resort import abandon_stdout, open_streams, unexpected

COMMANDS = {
    "demo": "DeepSeek-V3 on 2,048 H800: DualPipe against 1F1B and the others; no GPU, no PyTorch",
    "schedule": "one pipeline schedule by itself, on given op times",
    "simulate": "predict one job: time, memory, where the time goes",
    "compare": "predict several jobs, or several schedules of one job on equal devices and global batch",
    "explain": "why a job's step takes as long as it does: causes, critical path, what-ifs; two jobs: their difference",
    "search": "find the best strategy for a job's model, GPUs and global batch",
    "plan": "print a job's directives and its plan, program by program",
    "doctor": "is this machine, or this allocation under torchrun, fit to run plans?",
    "import": "a framework's launch (Megatron-LM, torchtitan, DeepSpeed …) as a job file",
    "export": "a job as a framework's launch, or its plan and trace in other tools' formats",
    "run": "execute a job's plan on torch.distributed (needs PyTorch)",
    "validate": "calibrate on another plan of the job, predict this one, run it, compare (needs PyTorch)",
    "calibrate": "measure a job's ops and links (needs PyTorch), or import them from traces; write a profile",
}
TORCH = ("run", "validate", "calibrate")


class _Parser(argparse.ArgumentParser):
    """Refuses with our errors, so that `--json` can print them."""

    def error(self, message: str) -> NoReturn:
        raise self.refusal(message)

    def refusal(self, message: str) -> PiperError:
        """argparse's sentence as an error that names the flag, what it takes and the nearest fix."""
        flags = [f for a in self._actions for f in a.option_strings]
        if m := re.fullmatch(r"argument ([^:]+): (.*)", message, re.DOTALL):
            flag = m[1].split("/")[-1]
            action = next((a for a in self._actions if flag in (*a.option_strings, a.dest, a.metavar)), None)
            words = [str(c) for c in action.choices] if action and action.choices else None
            said = re.search(r"'(.*?)'", m[2])
            near = nearest(said[1], words) if said and words else None
            fix = f"{flag} {near}" if near else f"{self.prog} --help"
            return PiperError(ErrorKind.USAGE, m[2], key=flag, allowed=words, suggestion=fix)
        near = None
        if m := re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL):
            first = m[1].split()[0] if m[1].split() else ""
            near = nearest(first, flags) if first.startswith("-") else None
            return PiperError(
                ErrorKind.USAGE,
                message,
                key=first or self.prog,
                allowed=flags,
                suggestion=near or f"{self.prog} --help",
            )
        return PiperError(ErrorKind.USAGE, message, key=self.prog, suggestion=f"{self.prog} --help")


def parser() -> _Parser:
    """All commands and flags."""
    does = "Predict any pipeline schedule of a real training, then run that plan."
    top = _Parser(prog="piper-sim", description=does, allow_abbrev=False)
    subs = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, help_text in COMMANDS.items():
        does = help_text[0].upper() + help_text[1:] + "."
        sub = subs.add_parser(name, help=help_text, description=does, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else")
        _FLAGS[name](sub)
    return top


def _demo(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--out", default="piper-sim-demo", metavar="DIR", help="where the report goes (default: %(default)s)"
    )


def _schedule(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "name",
        help="gpipe 1f1b interleaved-1f1b 1f1b-overlap interleaved-1f1b-overlap looped-bfs zb1p zb2p zbv v-half v-min "
        "dualpipe dualpipev",
    )
    sub.add_argument("--ranks", type=int, required=True, metavar="P", help="pipeline ranks")
    sub.add_argument(
        "--microbatches",
        type=int,
        required=True,
        metavar="M",
        help="microbatches, both directions together (stages x M up to 333,333)",
    )
    sub.add_argument("--chunks", type=int, default=None, metavar="V", help="stages per rank")
    sub.add_argument("--times", default=None, metavar="F=1,B=2", help="op times of a chunk: F, B or I and W, FB, p2p")
    sub.add_argument(
        "--w-memory", type=float, default=1.0, metavar="f", help="share of activations that lives from I to W"
    )
    sub.add_argument("--p2p-mode", choices=("buffered", "rendezvous"), default="buffered", help="what a transfer means")
    _out(sub)


def _job(sub: argparse.ArgumentParser, nargs: str | None = None) -> None:
    sub.add_argument("job", metavar="JOB", nargs=nargs, help="a job file (TOML)")
    sub.add_argument(
        "--set", action="append", default=[], metavar="section.key=value", dest="sets", help="override a key"
    )


def _out(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--out", default=None, metavar="DIR", help="also write report, picture, trace and plan there")
    sub.add_argument("--force", action="store_true", help="overwrite files in DIR")


def _simulate(sub: argparse.ArgumentParser) -> None:
    _job(sub)
    _out(sub)


def _compare(sub: argparse.ArgumentParser) -> None:
    _job(sub, nargs="+")
    of_six = "default: the demo's six; of several jobs, each one's own"
    sub.add_argument("--schedules", default=None, metavar="a,b,c", help=of_six)
    _out(sub)


def _explain(sub: argparse.ArgumentParser) -> None:
    _job(sub, nargs="?")
    sub.add_argument("job2", metavar="JOB2", nargs="?", help="another job, to be held against the first")
    of_run = "trace.tsv of a run, or of each rank: explain what was measured; with JOB, hold it against the prediction"
    sub.add_argument("--trace", nargs="+", metavar="FILE", help=of_run)


def _search(sub: argparse.ArgumentParser) -> None:
    _job(sub)
    of = "no new configuration is begun after so long (default: %(default)g)"
    sub.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help=of)
    sub.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: %(default)s)")
    sub.add_argument("--out", default=None, metavar="DIR", help="also write best.toml and search.json there")
    sub.add_argument("--force", action="store_true", help="overwrite files in DIR")


def _run(sub: argparse.ArgumentParser, steps: int = 1, what: str = "training steps") -> None:
    _job(sub)
    sub.add_argument(
        "-n", "--ranks", type=int, required=True, metavar="N", help="processes; must equal the job's ranks"
    )
    sub.add_argument("--steps", type=int, default=steps, metavar="K", help=f"{what} (default: {steps})")
    sub.add_argument("--backend", choices=("gloo", "nccl", "local"), default="gloo", help="transport")
    sub.add_argument(
        "--watchdog", type=float, default=15.0, metavar="SECONDS", help="a rank without progress has failed"
    )
    sub.add_argument(
        "--emulate", type=float, metavar="SECONDS", help="each pass of a layer takes so long, instead of arithmetic"
    )
    sub.add_argument(
        "--emulate-comm", type=float, default=0.0, metavar="SECONDS", help="each transfer ends so much later"
    )
    _out(sub)


def _run_or_replay(sub: argparse.ArgumentParser) -> None:
    _run(sub, 1, "training steps in all, those done before --resume among them")
    sub.add_argument(
        "--replay", metavar="TRACE", help="each op takes what it took in this trace.tsv, instead of arithmetic"
    )
    races = "on virtual ranks of a CPU that orders no more than a GPU's streams and allocator do"
    sub.add_argument("--racecheck", action="store_true", help=races)
    sub.add_argument("--save", metavar="DIR", help="write checkpoints there, which any plan of this job may resume")
    sub.add_argument("--every", type=int, metavar="K", help="steps between two checkpoints (default: at the end only)")
    sub.add_argument("--keep", type=int, metavar="N", help="the last N checkpoints are kept (default: 2)")
    sub.add_argument("--resume", metavar="DIR", help="go on from the newest checkpoint in DIR, or from DIR itself")


def _validate(sub: argparse.ArgumentParser) -> None:
    _run(sub, 5, "steps that are measured, after those to warm up")


def _calibrate(sub: argparse.ArgumentParser) -> None:
    _job(sub)
    calibrate_flags(sub)


def _import(sub: argparse.ArgumentParser) -> None:
    formats = "a launch script, a list of arguments, a log, a YAML, JSON or TOML config"
    sub.add_argument("file", metavar="FILE", help=formats)
    names = "megatron megatron-bridge nemo torchtitan deepspeed automodel accelerate primus gpt-neox llm-foundry"
    sub.add_argument("--from", default=None, metavar="NAME", dest="framework", help=f"whose, if not shown: {names}")


def _export(sub: argparse.ArgumentParser) -> None:
    _job(sub)
    names = "torch-csv piper-json chakra perfetto slurm dataframe megatron megatron-bridge torchtitan deepspeed"
    sub.add_argument("--to", required=True, metavar="NAME", help=f"{names} automodel accelerate primus")
    sub.add_argument("--out", required=True, metavar="DIR", help="where the files go")
    sub.add_argument("--against", metavar="FILE", help="a launch as imported: also print the arguments that change")
    sub.add_argument("--force", action="store_true", help="overwrite files in DIR")


_FLAGS = {
    "demo": _demo,
    "schedule": _schedule,
    "simulate": _simulate,
    "compare": _compare,
    "explain": _explain,
    "search": _search,
    "plan": _simulate,
    "doctor": lambda sub: None,
    "import": _import,
    "export": _export,
    "run": _run_or_replay,
    "validate": _validate,
    "calibrate": _calibrate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code of the contract."""
    args = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in args
    open_streams()
    top = parser()
    try:
        if not args:
            top.print_help()
            return 2
        _refuse_unknown(args)
        parsed, unknown = top.parse_known_args(args)
        if parsed.command is None or unknown:
            raise _lost(top, parsed.command, unknown)
        code = _dispatch(parsed)
        sys.stdout.flush()
        return code
    except PiperError as e:
        return _report(e, as_json)
    except BrokenPipeError:
        abandon_stdout()
        return 0
    except OSError as e:
        if e.filename is not None or e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            return _report(unexpected(e, args), as_json)
        abandon_stdout()  # a full disk behind `> file`; files under --out have errors of their own
        return _report(PiperError(ErrorKind.IO, f"cannot write to stdout: {e.strerror}", key="stdout"), False)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as e:  # nothing that a command meets may end in a traceback
        return _report(unexpected(e, args), as_json)


def _lost(top: _Parser, command: str | None, unknown: Sequence[str]) -> PiperError:
    """No command, or flags that it does not have."""
    if command is None:
        key, fix = "piper-sim", "piper-sim demo"
        return PiperError(ErrorKind.USAGE, "no command", key=key, allowed=list(COMMANDS), suggestion=fix)
    subs = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    sub: _Parser = subs.choices[command]
    return sub.refusal(f"unrecognized arguments: {' '.join(unknown)}")


def _refuse_unknown(args: Sequence[str]) -> None:
    first = next((a for a in args if not a.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        near = nearest(first, COMMANDS)
        raise PiperError(
            ErrorKind.USAGE, f"no command {first!r}", key="piper-sim", allowed=list(COMMANDS), suggestion=near
        )


def _dispatch(parsed: argparse.Namespace) -> int:
    if parsed.command in TORCH and not (parsed.command == "calibrate" and imports(parsed)):
        return _dispatch_torch(parsed)
    return _command(parsed.command)(parsed)


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """A command's function; what it imports is heavy, so nothing is imported before it is asked for."""
    match name:
        case "demo":
            from piper_sim.app.commands.demo import main as command
        case "schedule":
            from piper_sim.app.commands.schedule import main as command
        case "simulate":
            from piper_sim.app.commands.simulate import main as command
        case "compare":
            from piper_sim.app.commands.compare import main as command
        case "explain":
            from piper_sim.app.commands.explain import main as command
        case "doctor":
            from piper_sim.app.doctor.command import main as command
        case "search":
            from piper_sim.app.search import main as command
        case "plan":
            from piper_sim.app.commands.plan import main as command
        case "import":
            from piper_sim.app.commands.launches import import_main as command
        case "export":
            from piper_sim.app.commands.launches import export_main as command
        case "run":
            from piper_sim.app.commands.run import main as command
        case "validate":
            from piper_sim.app.commands.validate import main as command
        case "calibrate":
            from piper_sim.app.commands.calibrate import main as command
        case _:
            raise AssertionError(name)
    return command


def _has(module: str) -> bool:
    """Whether a module could be imported. A broken finder is as good as none."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _dispatch_torch(parsed: argparse.Namespace) -> int:
    """Commands that import the executor, hence torch and safetensors."""
    needed = {"torch": "PyTorch", "safetensors": "safetensors"}
    if (module := next((m for m in needed if not _has(m)), None)) is not None:
        raise PiperError(
            ErrorKind.MISSING_DEPENDENCY,
            f"{parsed.command} needs {needed[module]}",
            key=module,
            suggestion="pip install 'piper-sim[exec]' (on a laptop, install PyTorch's CPU build first)",
        )
    with unwinding():
        return _command(parsed.command)(parsed)


def _report(e: PiperError, as_json: bool) -> int:
    if as_json:
        fields = ("file", "key", "message", "allowed", "suggestion")
        error: dict[str, object] = {"kind": str(e.kind), **{k: getattr(e, k) for k in fields}}
        error |= {k: getattr(e, k) for k in ("rank", "op", "waiting") if hasattr(e, k)}
        print(json.dumps({"schema_version": 1, "error": error}))
    else:
        print(f"error: {e}", file=sys.stderr)
    return e.kind.exit_code


if __name__ == "__main__":
    sys.exit(main())

"""`piper-sim`: flags to commands, errors to exit codes. Heavy imports wait until a command needs them."""

import argparse
import errno
import gc
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ir.core.errors import ErrorKind, PiperError, nearest, printable, usage_error
from piper_sim.app.ending import abandon, open_streams, told, unexpected, unwinding

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_TABLE = tomllib.loads(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8"))
COMMANDS: Mapping[str, str] = _TABLE["commands"]
_TYPES: Mapping[str, Any] = {"int": int, "float": float}
TORCH = ("run", "validate", "calibrate")
_TOLD = {130: ("interrupted", "SIGINT"), 143: ("ended", "SIGTERM")}  # by exit code


class _Parser(argparse.ArgumentParser):
    """Refuses with our errors, so that `--json` can print them."""

    def error(self, message: str) -> NoReturn:
        raise self.refusal(message)

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Its help, as any answer: argparse passes over what a full disk has lost."""
        (file or sys.stderr).write(message)
        sys.stdout.flush()

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
            may = words or (re.sub(r" \(default.*", "", action.help) if action and action.help else flags)
            return usage_error(flag, m[2], fix, may)
        near = None
        if m := re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL):
            first = m[1].split()[0] if m[1].split() else ""
            near = nearest(first, flags) if first.startswith("-") else None
            return usage_error(first or self.prog, message, near or f"{self.prog} --help", flags)
        return usage_error(self.prog, message, f"{self.prog} --help", flags)


def parser() -> _Parser:
    """All commands and flags."""
    does = "Predict any pipeline schedule of a real training, then run that plan."
    top = _Parser(prog="piper-sim", description=does, allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="print the version and exit")
    subs = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, help_text in COMMANDS.items():
        does = help_text[0].upper() + help_text[1:] + "."
        sub = subs.add_parser(name, help=help_text, description=does, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout, and nothing else")
        _add_flags(sub, name)
    return top


def _add_flags(sub: argparse.ArgumentParser, command: str) -> None:
    """The rows of flags.toml that are of a command."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for row in (r for r in _TABLE["flags"] if command in r["of"].split()):
        where: argparse._ActionsContainer = sub
        if title := _TABLE["groups"].get(row.get("group")):
            where = groups[title] = groups.get(title) or sub.add_argument_group(title)
        given = {k: _TYPES[v] if k == "type" else v for k, v in row.items() if k not in ("of", "group", "flags")}
        where.add_argument(*row["flags"].split(), **given)


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
        if args[0] == "--version" or {*args} == {"--version", "--json"}:
            from importlib.metadata import version  # which a command does without

            said = version("piper-sim")
            print(json.dumps({"schema_version": 1, "version": said}) if as_json else f"piper-sim {said}", flush=True)
            return 0
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
        abandon(sys.stdout)
        return 0
    except OSError as e:
        if e.filename is not None or e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            return _report(unexpected(e, args), as_json)
        abandon(sys.stdout)  # a full disk behind `> file`; files under --out have errors of their own
        return _report(PiperError(ErrorKind.IO, f"cannot write to stdout: {e.strerror}", key="stdout"), False)
    except (KeyboardInterrupt, SystemExit) as e:
        ends = 130 if isinstance(e, KeyboardInterrupt) else e.code
        if not (isinstance(ends, int) and ends in _TOLD):  # argparse has printed its help
            raise
        word, key = _TOLD[ends]
        told(word, sys.stderr)
        if as_json:
            _report(PiperError(ErrorKind.USAGE, word, key=key), True)
        return ends
    except Exception as e:  # nothing that a command meets may end in a traceback
        return _report(unexpected(e, args), as_json)


def _lost(top: _Parser, command: str | None, unknown: Sequence[str]) -> PiperError:
    """No command, or flags that it does not have."""
    if command is None:
        return usage_error("piper-sim", "no command", "piper-sim demo", list(COMMANDS))
    subs = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    sub: _Parser = subs.choices[command]
    return sub.refusal(f"unrecognized arguments: {' '.join(unknown)}")


def _refuse_unknown(args: Sequence[str]) -> None:
    first = next((a for a in args if not a.startswith("-")), None)
    if first is not None and first not in COMMANDS:
        fix = _TABLE["meant"].get(first) or nearest(first, COMMANDS)
        raise usage_error("piper-sim", f"no command {first!r}", fix, list(COMMANDS))


def _dispatch(parsed: argparse.Namespace) -> int:
    reads = parsed.command == "calibrate" and (parsed.kineto or parsed.nccl or parsed.pairs)  # and measures nothing
    if parsed.command in TORCH and not reads:
        _need_torch(parsed.command)
    if parsed.command == "doctor":
        os.getcwd()  # where that is gone, libraries of torch's end the process
    with unwinding():
        return _command(parsed.command)(parsed)


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """A command's function. What is imported for it stays, so the collector is let in behind it: a quarter of a short
    command's time."""
    collecting, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        return _imported(name)
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if collecting:
            gc.enable()


def _imported(name: str) -> Callable[[argparse.Namespace], int]:
    """What it imports is heavy, so nothing is imported before it is asked for."""
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
        case "sweep":
            from piper_sim.app.sweep import main as command
        case "history":
            from piper_sim.app.logs import main as command
        case "cluster":
            from piper_sim.app.cluster import main as command
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


def _need_torch(command: str) -> None:
    """Of commands that import the executor, hence torch and safetensors. Raises PiperError (missing_dependency)."""
    needed = {"torch": "PyTorch", "safetensors": "safetensors"}
    if (module := next((m for m in needed if not _has(m)), None)) is not None:
        raise PiperError(
            ErrorKind.MISSING_DEPENDENCY,
            f"{command} needs {needed[module]}",
            key=module,
            suggestion="pip install 'piper-sim[exec]' (on a laptop, install PyTorch's CPU build first)",
        )


def _report(e: PiperError, as_json: bool) -> int:
    if e.details:
        told(printable(e.details.rstrip()), sys.stderr)
    if not as_json or not told(json.dumps({"schema_version": 1, "error": e.to_dict()}), sys.stdout):
        told(f"error: {e}", sys.stderr)
    return e.kind.exit_code


if __name__ == "__main__":
    sys.exit(main())

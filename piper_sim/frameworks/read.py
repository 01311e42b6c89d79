"""A launch file to its arguments, whatever its format: shell script, argument list, log, YAML, JSON or TOML."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ir.core.errors import PiperError
from ir.core.files import FileErrors, check_plain, parse_json, parse_toml, read_text
from piper_sim.frameworks.shell import environment, options, read_shell, started
from piper_sim.frameworks.sums import ANSWER, MAYBE_SET, UNSET
from piper_sim.frameworks.table import FORM, facts

MOST_ARGUMENTS = 10_000
LOGGED = re.compile(r"^[^\S\n]*(?:\d+:[^\S\n]*)?(?:\[[^\]\n]*\]:?[^\S\n]*)?([A-Za-z_]\w*) \.{2,} ?(.*)$", re.MULTILINE)
_WORLD = re.compile(r"using world size: (\d{1,9})\b")
_OMEGA = re.compile(r"\$\{([^${}]*)\}")
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
MOST_EVENTS = 100_000  # of a YAML file; the launches of all frameworks together have fewer
_SHOWN = "$?"  # a value that the file does not say


@dataclass(frozen=True)
class JobArgument:
    """One argument as written. place: "launcher" for what starts processes, "environment" for a variable, else "".

    file: the one that it stands in, where it is not the one imported. doubt: why its value is not known; perhaps: why
    it may be another.
    """

    name: str
    value: object
    place: str = ""
    file: str = ""
    doubt: str = ""
    perhaps: str = ""


@dataclass(frozen=True)
class JobFile:
    """A file, read: its arguments in order, the framework that it looks like, files that it writes by itself, the
    program that it starts, and how many other commands of it train.
    """

    path: str
    framework: str
    arguments: tuple[JobArgument, ...]
    inside: Mapping[str, str] = field(default_factory=dict)
    program: str = ""
    others: int = 0


def read_launch(path: str, framework: str | None = None, text: str | None = None) -> JobFile:
    """Read one file. text: its content, where another file holds it.

    Raises PiperError (io): it cannot be read; (job): it is in none of the formats.
    """
    text = read_text(path, FORM) if text is None else text
    suffix = Path(path).suffix.lower()
    if suffix == ".json" or (suffix not in (".sh", ".yaml", ".yml", ".toml") and text.lstrip().startswith("{")):
        return _tree(path, framework, _mapping(parse_json(text, FORM, path), path))
    if suffix == ".toml":
        return _tree(path, framework, parse_toml(text, FORM, path))
    if suffix in (".yaml", ".yml"):
        return _tree(path, framework, _mapping(parse_yaml(text, FORM, path), path))
    if len(LOGGED.findall(text)) > 5:
        found = [JobArgument(m[1], _typed(m[2].strip())) for m in LOGGED.finditer(text)]
        known = {a.name: a for a in found}  # every rank may print them
        if (world := _WORLD.search(text)) and "world_size" not in known:
            known["world_size"] = JobArgument("world_size", int(world[1]))
        return JobFile(path, framework or "megatron", tuple(known.values()))
    return _script(path, framework, text)


def parse_yaml(text: str, form: FileErrors, file: str) -> Any:
    """YAML by the safe loader: no objects, no aliases that multiply, no key twice; 1e-05 is a number as in JSON.

    Raises PiperError (job): not YAML, or beyond reason.
    """
    import yaml  # a tenth of a second that no other command needs

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same values; the other one takes seconds for a MB
    depth, anchors, events = 0, 0, 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            anchors += isinstance(event, yaml.AliasEvent)
            events += 1
            if depth > 64 or anchors > 100:
                raise form.wrong("nested too deep, or too many aliases", file, None, "tables and lists 64 deep")
            if events > MOST_EVENTS:
                raise form.wrong("too many keys and values", file, None, f"{MOST_EVENTS:,} of them")
        value = loader(text).get_single_data()
    except yaml.YAMLError as e:
        if "nesting" in str(getattr(e, "problem", "")):  # the library's own limit, from 6.0.4 on
            raise form.wrong("nested too deep", file, None, "tables and lists 64 deep") from None
        at = getattr(e, "problem_mark", None)
        where = f"line {at.line + 1}" if at else None
        raise form.wrong(f"not YAML: {getattr(e, 'problem', None) or 'unreadable'}", file, where, "YAML") from None
    except (ValueError, RecursionError, OverflowError, TypeError, KeyError) as e:
        raise form.wrong(f"not YAML: {str(e)[:80]}", file, None, "YAML") from None
    value = _plain(value)
    check_plain(value, form, file)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    if isinstance(value, str) and _FLOAT.fullmatch(value):
        return float(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FORM.wrong("no table of arguments", path, None, "sections and keys")
    return value


def leaves(value: object, at: str = "") -> Iterator[tuple[str, object]]:
    """(dotted path, value) of every leaf; lists are leaves, and so is an empty section.

    >>> list(leaves({"a": {"b": 1, "c": [2]}, "d": {}}))
    [('a.b', 1), ('a.c', [2]), ('d', {})]
    """
    if isinstance(value, Mapping) and (value or not at):
        for k, v in value.items():
            yield from leaves(v, f"{at}.{k}" if at else str(k))
    else:
        yield at, value


def _tree(path: str, framework: str | None, value: dict[str, Any]) -> JobFile:
    found = list(leaves(value))
    if len(found) > MOST_ARGUMENTS:
        raise FORM.wrong("this is not a launch: too many keys", path, None, f"up to {MOST_ARGUMENTS:,}")
    known = dict(found)
    arguments = tuple(
        JobArgument(k, _resolved(v, k, known), "environment" if k.startswith("ENV_VARS.") else "") for k, v in found
    )
    return JobFile(path, framework or _framework(value, path), arguments)


def _framework(value: Mapping[str, Any], path: str) -> str:
    """Whose file it is, by facts.toml's table of sections that only one of them has."""
    spelled = {k.replace("-", "_").lstrip("_") for k in value}
    for row in facts()["shown"]:
        if (
            all(name in value for name in row.get("has", ()))
            and row.get("lacks") not in value
            and ("table" not in row or isinstance(value.get(row["table"]), Mapping))
            and ("spelled" not in row or not spelled.isdisjoint(row["spelled"]))
            and path.endswith(row.get("ends", ""))
        ):
            return str(row["framework"])
    message = f"which framework's file is this? its sections are {', '.join(list(value)[:6])}"
    known = "Megatron-LM, Megatron-Bridge, NeMo, torchtitan, DeepSpeed, Automodel, accelerate, Primus, gpt-neox"
    raise FORM.wrong(message, path, "--from", f"a launch of {known} or llm-foundry", "--from NAME")


def _resolved(value: object, at: str, known: Mapping[str, object], depth: int = 0) -> object:
    """A value with references put in: OmegaConf's ${model.x}, ${.x}, ${multiply:4, ${.x}}, Primus's ${NAME:default}."""
    if not isinstance(value, str) or "${" not in value or depth > 9:
        return value
    for _ in range(20):
        if (m := _OMEGA.search(value)) is None:
            break
        found = _reference(m[1], at, known)
        if found is UNSET:
            return value
        found = _resolved(found, at, known, depth + 1)
        if m.span() == (0, len(value)):
            return found
        value = (value[: m.start()] + str(found) + value[m.end() :])[:10_000]
    return _typed(value)


def _reference(text: str, at: str, known: Mapping[str, object]) -> object:
    name, colon, rest = text.partition(":")
    if name in ("multiply", "divide", "sum", "int_div", "oc.env"):
        words = [w.strip() for w in rest.split(",")]
        if name == "oc.env":
            return _typed(words[1]) if len(words) > 1 else UNSET
        if len(words) != 2 or not all(re.fullmatch(r"\d{1,12}", w) for w in words):
            return UNSET
        a, b = map(int, words)
        return a * b if name == "multiply" else a + b if name == "sum" else a // b if b else UNSET
    if colon:  # an environment variable with a default, as Primus writes it
        return _typed(rest)
    dots = len(name) - len(name.lstrip("."))
    path = name if not dots else ".".join([*at.split(".")[:-dots], name.lstrip(".")])
    return known.get(path, UNSET)


def _typed(text: str) -> object:
    """A word as JSON has it, or the text."""
    said = {"True": True, "False": False, "None": None, "null": None}
    if text in said:
        return said[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, int | float | list | bool) else text


def _script(path: str, framework: str | None, text: str) -> JobFile:
    with FORM.naming(path):
        job = read_shell(text)
    words = [w.replace(MAYBE_SET, "") for w in job.command]
    modules = {i + 1 for i, w in enumerate(words) if w in ("-m", "--module")}
    programs = [i for i, w in enumerate(words) if w.endswith(".py") or (i in modules and "torchtitan" in w)]
    first = next((i for i, w in enumerate(words) if w.startswith("--")), len(words))
    cut = programs[-1] if programs else first if first == 0 or not _launches(words[:first]) else len(words)
    launcher, program = job.command[:cut], job.command[cut + bool(programs) :]
    found = [x for place, part in [("launcher", job.batch), *started(launcher)] for x in _options(part, place)]
    found += [JobArgument(k, _said(v), "environment") for k, v in environment(job).items()]
    own = list(_options(program, ""))
    own += [replace(a, doubt="bash ends the command on a line before it") for a in _options(job.lost, "")]
    if not own and not any(a.place == "launcher" for a in found):
        raise FORM.wrong("no command with arguments in it", path, None, "a script that starts a training program")
    if sum(len(_words(a.value)) for a in (*found, *own)) > MOST_ARGUMENTS:
        raise FORM.wrong("this is not a launch: too many words", path, None, f"up to {MOST_ARGUMENTS:,}")
    return JobFile(
        path,
        framework or _of_script(launcher, own),
        (*found, *own),
        {_said(k): v for k, v in job.files.items()},
        Path(words[programs[-1]]).name if programs else "",
        job.others,
    )


def _said(text: str) -> str:
    return text.replace(ANSWER, UNSET).replace(UNSET, _SHOWN)


def _launches(words: Iterable[str]) -> bool:
    return any(re.search(r"torchrun|srun|deepspeed|python|accelerate|mpirun|torch\.distributed", w) for w in words)


def _words(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _options(words: list[str], place: str) -> Iterator[JobArgument]:
    for marked, found in options(words):
        if str(found).startswith(f"{UNSET}$"):
            yield JobArgument(str(found)[1:], "", place)
            continue
        found = found[0] if place == "launcher" and isinstance(found, list) else found  # behind it a program is named
        name, value = marked.replace(MAYBE_SET, ""), _unmarked(found)
        perhaps = (
            "a branch of the script that the file does not decide sets it" if (name, value) != (marked, found) else ""
        )
        if name or not place:
            unset = any(UNSET in str(v) for v in _words(value)) or UNSET in name
            doubt = "a variable or command whose value the file does not say" if unset else ""
            shown: object = " ".join(_said(str(v)) for v in _words(value)) if unset else value
            yield JobArgument(_said(name or str(value)), shown if name else "", place, "", doubt, perhaps)


def _unmarked(value: object) -> object:
    if isinstance(value, list):
        return [str(v).replace(MAYBE_SET, "") for v in value]
    return value.replace(MAYBE_SET, "") if isinstance(value, str) else value


def _of_script(launcher: Iterable[str], own: Iterable[JobArgument]) -> str:
    names = {a.name.replace("_", "-") for a in own}
    if "accelerate" in {Path(w).name for w in launcher} and "--num-layers" not in names:
        return "accelerate"
    if any(n.startswith(("--parallelism.", "--job.", "--training.", "--module")) for n in names):
        return "torchtitan"
    deepspeed = {"--deepspeed", "--deepspeed-config", "--zero-stage", "--num-key-value-heads"}
    if names & deepspeed or any("deepspeed" in w for w in launcher):
        return "deepspeed"
    if names & {"--per-device-train-batch-size", "--model-name-or-path"}:  # transformers' Trainer, which accelerates
        return "accelerate"
    return "megatron"


def beside(launch: JobFile, name: str, folders: Iterable[str] = ("",)) -> JobFile | None:
    """A file that a launch names: one that it writes by itself, or one that lies beside it or above; None if none."""
    for key, text in launch.inside.items():
        if Path(key).name == Path(name).name:
            try:
                return read_launch(name, launch.framework, text)
            except PiperError as e:  # the file that people have is the one that writes it
                raise FORM.wrong(f"{name}: {e.message}", launch.path, e.key, e.allowed, e.suggestion) from None
    base = Path(launch.path).parent
    for folder in (base, *base.resolve().parents):
        for inner in folders:
            try:
                path = folder / inner / name
                if path.is_file():  # a script that names one may be anybody's
                    return read_launch(str(path), None if launch.framework == "megatron" else launch.framework)
            except (OSError, ValueError, PiperError):
                continue
    return None

"""The hook of mkdocs: pages of the repository's root, and a reference made from the code as it is imported."""

from __future__ import annotations

import argparse
import inspect
import json
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"index.md": "README.md"} | {x: x for x in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")}
FIRST = {  # sections in their order; a page that stands in none stands in the last
    "Use": ["RECIPES", "WHICH_SCHEDULE", "SEARCH", "EXPLAIN", "SWEEP", "REPORT", "LIBRARY"],
    "In and out": ["IMPORT_EXPORT", "YOUR_MODEL", "CONFIGS", "CLUSTER_FILE", "HISTORY"],
    "Run": ["CLUSTERS", "DOCTOR", "CALIBRATE", "CHECKPOINTS"],
    "How it works": ["ARCHITECTURE", "STRATEGIES", "COSTS", "ENGINE", "PUBLISHED", "GLOSSARY"],
}
FORMATS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / ".ci" / "formats.toml").read_text("utf-8"))
RESULTS: dict[str, dict[str, str]] = tomllib.loads((ROOT / ".ci" / "results.toml").read_text("utf-8"))
MADE = [name for name, row in FORMATS.items() if "reads" in row]  # the others are told by a page of docs/ alone
EXAMPLE_LINES = 80
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
NAMED = re.compile(r"(?<![\w`\[(/])docs/(\w+)\.md")


def on_files(files: Any, config: Any) -> Any:
    """Put the pages that are not in docs/ among the files, with every file of the repository that a page links to."""
    from mkdocs.structure.files import File

    made = {name: _linked((ROOT / own).read_text("utf-8"), "") for name, own in ROOT_PAGES.items()}
    made |= {"reference/commands.md": _commands(), "reference/job.md": _job(), "reference/library.md": _library()}
    made |= {f"reference/{name}.md": _format(**FORMATS[name]) for name in MADE}
    made |= {"reference/files.md": _files(), "reference/results.md": made["reference/results.md"] + _results()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    pages = [*(p.read_text("utf-8") for p in (ROOT / "docs").glob("*.md")), *made.values()]
    for path in sorted(
        {p for text in pages for p in re.findall(r"\]\((?:\.\./)*source/([^)\s#]+)", _linked(text, "docs"))}
    ):
        files.append(File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path)))
    _nav(config, [f.src_uri for f in files if f.src_uri.endswith(".md")])
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page of docs/ with links that hold on the site too."""
    return markdown if page.file.src_uri in ROOT_PAGES or "/" in page.file.src_uri else _linked(markdown, "docs")


def _linked(text: str, folder: str) -> str:
    """Links of a page in a folder of the repository as they stand on the site; files that are no pages are copied."""

    def one(m: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, m[2]))
        if "://" in m[2] or not (ROOT / target).is_file():
            return m[0]
        inside = target.removeprefix("docs/")
        kept = inside if inside != target or target in ROOT_PAGES.values() else f"source/{target}"
        return f"{m[1]}{'index.md' if kept == 'README.md' else kept}{m[3] or ''}{m[4]}"

    blocks = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    named = (
        b if b.startswith("```") else NAMED.sub(r"[\1](docs/\1.md)" if folder == "" else r"[\1](\1.md)", b)
        for b in blocks
    )
    return "".join(b if b.startswith("```") else LINK.sub(one, b) for b in named)


def _nav(config: Any, pages: list[str]) -> None:
    known = {x for names in FIRST.values() for x in names}
    rest = sorted(
        p for p in pages if "/" not in p and p.removesuffix(".md") not in known | {"index", "CHANGELOG", "CONTRIBUTING"}
    )
    nav: list[Any] = ["index.md"]
    nav += [{title: [f"{n}.md" for n in names if f"{n}.md" in pages]} for title, names in FIRST.items()]
    nav[-1]["How it works"] += rest
    nav += [{"Reference": [f"reference/{n}.md" for n in ("job", "commands", "library", "files", *MADE)]}]
    config.nav = [*nav, {"Project": ["CHANGELOG.md", "CONTRIBUTING.md"]}]


def _doc(item: object) -> str:
    """A docstring, its examples as such."""
    text = inspect.getdoc(item) or ""
    return re.sub(r"(^>>> .*?)(?=\n\n|\Z)", r"```pycon\n\1\n```", text, flags=re.DOTALL | re.MULTILINE)


def _keys(cls: type, null: bool = False) -> list[str]:
    """A section's or a file's keys as rows of a table: what a value may be, and what it is where it is left out.

    null: the format has it.
    """
    hints, empty = get_type_hints(cls, include_extras=True), (MISSING, msgspec.NODEFAULT)
    own = msgspec.structs.fields(cls) if issubclass(cls, msgspec.Struct) else fields(cls)
    rows = ["", "| key | values | default |", "|---|---|---|"]
    for f in own:
        default = f.default if f.default not in empty else "" if f.default_factory in empty else f.default_factory()
        cell = "" if default in ("", None) or len(repr(default)) > 60 else f"`{default!r}`"
        if f.name != "overrides":
            none = " or null" if null and type(None) in get_args(hints[f.name]) else ""
            rows.append(f"| `{f.name}` | {_type(hints[f.name])}{none} | {cell} |")
    return rows


def _type(hint: Any) -> str:
    """What a value may be, in words."""
    if isinstance(hint, str):
        return f"`{hint}`"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _words(str(x.value) for x in hint)
    if get_origin(hint) is Annotated:
        base, *metas = get_args(hint)
        words = [w for m in metas for w in (getattr(m, "extra", None) or {}).get("words", ())]
        ends = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        bounds = [f"{sign} {v:g}" for m in metas for k, sign in ends.items() if (v := getattr(m, k, None)) is not None]
        return ", ".join(f"`{w}`" for w in words) or " ".join([_type(base), *bounds])
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_type(a) for a in get_args(hint) if a is not type(None))
    if args := [a for a in get_args(hint) if a is not ...]:
        table = get_origin(hint) in (dict, Mapping)  # of text as keys
        of = ", ".join(dict.fromkeys(map(_type, args[1:] if table and args[0] is str else args)))
        return f"{'table' if table else get_origin(hint).__name__.lower()} of {of}"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true, false"}.get(
        hint.__name__, hint.__name__.lstrip("_")
    )


def _job() -> str:
    """The job file: a section's docstring and its keys, as ir/job/schema.py has them."""
    say = "TOML. Units stand in the names of keys. `--set section.key=value` says one on the command line."
    sections = import_module("ir.job.schema").SECTIONS.items()
    out = ["# The job file\n", say, *(x for n, cls in sections for x in (f"\n## [{n}]\n", _doc(cls), *_keys(cls)))]
    return "\n".join([*out, *_example("tests/fuzz/seeds/job.toml")]) + "\n"


def _format(
    title: str,
    writes: str,
    reads: str,
    say: str = "",
    doc: str = "",
    keys: tuple[str, ...] = (),
    example: str = "",
    page: str = "",
    **_: Any,
) -> str:
    """A file's format as the code that reads it tells it, all its tables, and a valid file."""
    out = [f"# {title}\n", f"*Written by* {writes}. *Read by* {reads}.", ""]
    out += [f"More: [{page}](../{page}.md).", ""] if page else []
    out += [say, _doc(import_module(doc)) if doc else "", ""]
    for module, _, name in (key.partition(":") for key in keys):
        found = getattr(import_module(module), name)
        if isinstance(found, Mapping):
            out += ["", "| | keys |", "|---|---|", *(f"| `{k}` | {_words(v)} |" for k, v in found.items())]
            continue
        for cls in _tables(found):
            out += ["" if cls is found else f"\n## {cls.__name__.lstrip('_')}\n", _doc(cls), *_keys(cls, null=True)]
    return "\n".join([*out, *(_example(example) if example else ())]) + "\n"


def _example(file: str) -> list[str]:
    """A file's lines; JSON that is one line as people lay it out."""
    lines = (ROOT / file).read_text("utf-8").rstrip().splitlines()
    if file.endswith(".json") and len(lines) == 1:
        lines = json.dumps(json.loads(lines[0]), indent=1, ensure_ascii=False).splitlines()
    cut = [f"… {len(lines) - EXAMPLE_LINES} more lines"] if len(lines) > EXAMPLE_LINES else []
    return ["\n## For example\n", "```", *lines[:EXAMPLE_LINES], *cut, "```"]


def _words(values: Any) -> str:
    return ", ".join(f"`{x}`" for x in sorted(values))


def _tables(cls: Any, known: tuple[Any, ...] = ()) -> Iterator[Any]:
    """A class of keys, and those of its keys that are tables themselves, each once."""
    yield cls
    seen = {*known, cls}
    for hint in get_type_hints(cls, include_extras=True).values():
        for inner in _inside(hint):
            if inner not in seen:
                for found in _tables(inner, tuple(seen)):
                    seen.add(found)
                    yield found


def _inside(hint: Any) -> Iterator[Any]:
    """The classes of keys in a type."""
    if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, msgspec.Struct)):
        yield hint
    for arg in get_args(hint):
        yield from _inside(arg)


def _results() -> str:
    """The objects of `--json`, key by key."""
    out = ["Each object has `schema_version` = 1. A command that fails prints `error` instead, and ends with a code."]
    for name, keys in RESULTS.items():
        out += [f"\n## {name}\n", "| key | |", "|---|---|", *(f"| `{k}` | {what} |" for k, what in keys.items())]
    return "\n".join(out) + "\n"


def _files() -> str:
    """Every format that is read or written, and where it is told."""
    told = {"The job: `job.toml`": "job.md"} | {FORMATS[name]["title"]: f"{name}.md" for name in MADE}
    told |= {row["title"]: f"../{row['page']}.md" for name, row in FORMATS.items() if name not in MADE}
    return "# Files\n\n| file | page |\n|---|---|\n" + "".join(
        f"| {k} | [{v.rpartition(chr(47))[2]}]({v}) |\n" for k, v in told.items()
    )


def _commands() -> str:
    """Every command with its flags, as argparse has them."""
    top = import_module("piper_sim.app.cli").parser()
    subs = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    codes = "0 fine, 2 bad input, 3 found in graph, plan or memory, 4 a run failed, 5 a gate was missed"
    out = [f"# Commands\n\nEvery command takes `--json`. Exit codes: {codes}.\n"]
    for name, sub in subs.choices.items():
        out += [f"\n## {name}\n", sub.description or "", "", "| flag | |", "|---|---|"]
        for a in sub._actions[1:]:
            flag = " ".join([", ".join(a.option_strings) or a.dest, *([str(a.metavar)] if a.metavar else [])])
            text = (a.help or "").replace("%(default)s", str(a.default)).replace("|", "\\|")
            out.append(f"| `{flag}` | {text} |")
    return "\n".join(out) + "\n"


def _library() -> str:
    """What `import piper_sim` gives."""
    library = import_module("piper_sim")
    out = ["# Library\n", _doc(library), ""]
    for name in sorted(library.__all__):
        item = getattr(library, name)
        sign = "" if isinstance(item, type) else str(inspect.signature(item))
        out += [f"\n## {name}\n", f"```python\n{name}{sign}\n```" if sign else "", _doc(item), ""]
        for own, value in vars(item).items() if isinstance(item, type) else ():
            if own[0] != "_" and (isinstance(value, property) or inspect.isfunction(value)):
                out += [f"- **{own}**: {(inspect.getdoc(value) or '').partition(chr(10))[0]}"]
    return "\n".join(out) + "\n"

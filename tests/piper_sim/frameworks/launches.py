"""Public launches, kept beside the repository as rows, as files again; what an importer finds in them."""

import csv
import json
import re
import shlex
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ir.core.errors import PiperError
from ir.job.build import resolve
from ir.job.load import job_from
from ir.job.model import read_model
from ir.job.table import toml_sections
from ir.workload.layout import parse_layout
from piper_sim.frameworks.importing import UNDERSTOOD, ImportedJob, import_launch
from piper_sim.frameworks.table import chains

ENDS = {"cli": ".sh", "yaml": ".yaml", "json": ".json", "toml": ".toml", "log": ".log"}
SAME = {"layers", "hidden", "heads", "ffn", "kv_heads", "seq_len", "experts", "top_k", "moe_ffn", "mtp"}
SAME |= {"tp", "pp", "cp", "ep", "etp", "gpus"}
KNOWN_AS = {"megatron-lm": "megatron"}
ALSO = {"nemo": ["megatron-bridge"], "llm-foundry": ["accelerate", "megatron"]}  # no list of their own
OUTSIDE = {"olmo-core"}  # resolved from Python, of no file that people have
Row = tuple[str, str]


@dataclass
class JobCoverage:
    """stated, right: facts of expected.csv, and those that the job has. unlisted: arguments in no list or in two.
    untrue: arguments that are called understood, and stand otherwise in the job. matter: arguments of
    arguments_known.csv, which holds those that bear on time or memory, by list. rest: those not understood, by count.
    """

    stated: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    untrue: list[str] = field(default_factory=list)
    lists: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    matter: Counter[str] = field(default_factory=Counter)
    rest: Counter[str] = field(default_factory=Counter)


def files_of(folder: Path) -> dict[str, dict[tuple[str, str, str], list[Row]]]:
    """launch -> (path, format, framework) -> its rows."""
    out: dict[str, dict[tuple[str, str, str], list[Row]]] = {}
    with (folder / "arguments.csv").open(encoding="utf-8") as f:
        for r in csv.DictReader(f):
            words = r["source"].partition(" @")[0].split()
            key = (words[1] if len(words) > 1 else "x", r["format"], r["framework"])
            out.setdefault(r["launch_id"], {}).setdefault(key, []).append((r["argument"], r["value"]))
    return out


def text_of(form: str, rows: list[Row]) -> str:
    """One file's text."""
    if form == "log":
        lines = (f"using world size: {v}, x" if a == "@world_size" else f"  {a} {'.' * 20} {v}" for a, v in rows)
        return "\n".join(lines) + "\n"
    if form == "cli":
        head, words = ["#!/bin/bash"], list[str]()
        for a, v in rows:
            if a.startswith("@sbatch."):
                head.append(f"#SBATCH {a[8:]}={v}")
            elif a.startswith("@env."):
                head.append(f"export {a[5:]}={shlex.quote(v)}")
            else:
                words.append(f"{a} {v}".strip() if not a.startswith("@") else v)
        start = "" if any(a == "@launcher" for a, _ in rows) else "python "
        return "\n".join(head) + "\n" + start + " \\\n  ".join(words) + "\n"
    tree: dict[str, Any] = {}
    for a, v in rows:
        at, *path = [p.replace("\0", ".") for p in a.replace("\\.", "\0").split(".")]
        inner = tree
        for p in path:
            inner, at = inner.setdefault(at, {}), p
        inner[at] = json.loads(v)
    if form == "toml":
        return toml_sections({"": {k: v for k, v in tree.items() if not isinstance(v, dict)}} | _tables(tree)).replace(
            "[]\n", "", 1
        )
    return json.dumps(tree) if form == "json" else yaml.safe_dump(tree, sort_keys=False)


def _tables(tree: dict[str, Any], at: str = "") -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for k, v in tree.items():
        if isinstance(v, dict):
            out[at + k] = {n: x for n, x in v.items() if not isinstance(x, dict)}
            out |= _tables(v, f"{at}{k}.")
    return out


def written(files: dict[tuple[str, str, str], list[Row]], folder: Path) -> Path:
    """A launch's files in a folder; the one to import."""
    first = None
    for n, ((path, form, framework), rows) in enumerate(files.items()):
        name = path if framework == "primus" else str(Path(Path(path).name).with_suffix(ENDS[form]))
        name = {"json": "ds_config.json", "toml": "base_config.toml"}.get(form, name) if n else name
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text_of(form, rows), encoding="utf-8")
        first = first or folder / name
    assert first is not None
    return first


def known_of(folder: Path) -> dict[str, set[str]]:
    """framework -> last words of the arguments that matter to it, older names too."""
    out: dict[str, set[str]] = defaultdict(set)
    with (folder / "arguments_known.csv").open(encoding="utf-8") as f:
        for r in csv.DictReader(f):
            words = [r["argument"], *re.sub(r"\(.*?\)", "", r["older_aliases"]).split(";")]
            out[KNOWN_AS.get(r["framework"], r["framework"])] |= {last_of(w) for w in words if w.strip()}
    return {k: set().union(*(out[c] for c in [*v, *ALSO.get(k, ())])) for k, v in chains().items()}


def last_of(argument: str) -> str:
    """An argument without its section, as all frameworks spell it."""
    return argument.strip().lstrip("-").split()[0].replace("-", "_").split(".")[-1]


def facts_of(found: ImportedJob) -> dict[str, object]:
    """expected.csv's columns, read off the job as it loads."""
    job = resolve(job_from(found.job), 8)
    m, p, s = read_model(job).config, job.parallel, job.schedule
    layers: object = p.layers
    if s.layout is not None:
        layers = [t.count("t") for t in parse_layout(s.layout)]
    moe, dp = m.moe, p.dp or 1
    return {
        **{"layers": m.layers, "hidden": m.hidden, "ffn": m.ffn, "heads": m.heads, "kv_heads": m.kv_heads},
        **{"head_dim": m.head_dim, "vocab_padded": m.vocab, "seq_len": job.model.seq_len, "mtp": m.mtp},
        **{"experts": moe and moe.experts, "top_k": moe and moe.top_k, "moe_ffn": moe and moe.ffn},
        **{k: getattr(p, k) for k in ("tp", "pp", "cp", "ep", "etp", "zero")},
        "sequence_parallel": int(p.sequence_parallel),
        "micro_batch_size": s.microbatch_size,
        "global_batch_size": s.microbatch_size * (s.microbatches or 1) * dp,
        **{"microbatches": s.microbatches, "schedule": s.name, "vp": s.stages_per_rank or 1},
        "layout": None if isinstance(layers, str) else " ".join(map(str, layers)),  # type: ignore[call-overload]
        "recompute": s.recompute if isinstance(s.recompute, str) else "selective",
        **{"precision": job.precision.compute, "optimizer": job.optimizer.name.removesuffix("w")},
        "gpus": p.tp * p.cp * p.pp * dp,
    }


def coverage(folder: Path, tmp: Path) -> JobCoverage:
    """Import every launch and hold it against expected.csv, column by column."""
    out = JobCoverage()
    with (folder / "expected.csv").open(encoding="utf-8") as f:
        expected = {r["launch_id"]: r for r in csv.DictReader(f)}
    known = known_of(folder)
    for n, (launch, files) in enumerate(files_of(folder).items()):
        if launch.split("/")[0] in OUTSIDE:
            continue
        (_, form, _), rows = next(iter(files.items()))
        try:
            found = import_launch(str(written(files, tmp / str(n))))
        except PiperError as e:
            out.wrong.append(f"{launch}: {e}")
            continue
        names = [
            a.removeprefix("@sbatch.").removeprefix("@env.") for a, _ in rows if a not in ("@launcher", "@program")
        ]
        own = [e.argument.name for e in found.entries if not e.argument.file and e.argument.name]
        names = [a.replace("\\.", ".").removeprefix("@") if form != "cli" else a for a in names]
        twice = form == "log"  # the number of ranks is printed in two ways
        if (set(names) != set(own)) if twice else sorted(names) != sorted(own):
            out.unlisted.append(f"{launch}: {set(names) ^ set(own)}")
        for e in found.entries:
            out.lists[e.list] += bool(e.argument.name)
            if e.argument.name and last_of(e.argument.name) in known[found.framework]:
                out.matter[e.list] += 1
                out.rest[f"{e.list} {found.framework} {e.argument.name}: {e.note}"] += e.list != UNDERSTOOD
        got = facts_of(found)
        last = {e.fact: e for e in found.entries if e.fact and e.list == UNDERSTOOD}
        said = {k: (e.said, got[k]) for k, e in last.items() if k in SAME and e.said != got[k]}
        out.untrue += [f"{launch} {k}: {a} is understood, {b} stands in the job" for k, (a, b) in said.items()]
        for column, value in expected.get(launch, {}).items():
            name = column.removeprefix("default_")
            if name in got and value:
                right = str(got[name]) in value.split("|") or value.split(":")[0].removesuffix("w") == str(got[name])
                out.stated, out.right = out.stated + 1, out.right + right
                if not right:
                    out.wrong.append(f"{launch} {column}: {value}, not {got[name]}")
    return out


if __name__ == "__main__":  # python -m tests.piper_sim.frameworks.launches FOLDER: the score, and what is missed
    with tempfile.TemporaryDirectory() as folder:
        c = coverage(Path(sys.argv[1]), Path(folder))
    share = c.matter[UNDERSTOOD] / c.matter.total()
    print(f"{dict(c.lists)}; of {c.matter.total()} that matter {share:.2%} understood; facts {c.right}/{c.stated}")
    for text, count in c.rest.most_common(40):
        print(count, text)

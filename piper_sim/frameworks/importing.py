"""`piper-sim import`: a launch file as a job, with what was understood, assumed and not understood."""

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models.hardware import presets as gpus
from ir.core.errors import PiperError
from ir.core.files import read_json
from ir.job.schema import OPEN
from ir.job.table import keys_of, toml_sections
from ir.workload.config.keys import TYPES
from ir.workload.config.load import config_from
from piper_sim.frameworks.read import JobArgument, JobFile, beside, read_launch
from piper_sim.frameworks.table import FORM, JobTableRow, framework_named, row_of
from piper_sim.frameworks.table import facts as tables
from piper_sim.frameworks.to_job.draft import Facts, JobDraft
from piper_sim.frameworks.to_job.launch import draft, troubles
from piper_sim.frameworks.values import FILE, INERT, PRESUMED, is_set, presumed, read_value

UNDERSTOOD, ASSUMED, UNKNOWN = "understood", "assumed", "unknown"
PRIMUS = ("primus/configs/models/megatron", "primus/configs/models/torchtitan", "configs/models/megatron", "")
MOST_FILES = 12
COUNTED = {"layers", "pp", "vp", "tp", "cp", "ep", "etp", "experts", "microbatches", "nodes", "per_node"}
MOST = 2**20  # of what is counted out one by one
LOSSES = {"router_aux_loss_coef", "aux_loss_alpha"}  # of a config.json, which count where a job says them
DIVIDES = {"tp", "cp", "pp", "ep", "etp", "microbatch_size", "pp_microbatch_size", "nodes", "per_node"}  # others


@dataclass(frozen=True)
class JobEntry:
    """What became of one argument. key: the job's, "" where it has none. list: understood, assumed or unknown.

    fact, said: what it states. only: where alone it matters.
    """

    argument: JobArgument
    list: str
    key: str = ""
    note: str = ""
    fact: str = ""
    said: object = None
    only: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """As the command prints it."""
        note = "; ".join(x for x in (f"in {self.argument.file}" if self.argument.file else "", self.note) if x)
        return {"argument": self.argument.name, "value": self.argument.value, "key": self.key, "note": note}


@dataclass(frozen=True)
class ImportedJob:
    """A launch as a job: section -> key -> value, and an entry for each argument, those that nobody stated too."""

    framework: str
    job: Mapping[str, Mapping[str, Any]]
    entries: tuple[JobEntry, ...]

    def to_dict(self) -> dict[str, object]:
        """The command's object."""
        lists = {n: [e.to_dict() for e in self.entries if e.list == n] for n in (UNDERSTOOD, ASSUMED, UNKNOWN)}
        return {"framework": self.framework, "job": self.job, **lists}

    def to_toml(self) -> str:
        """The job file, with what was assumed or not understood as comments above it."""
        return f"# from a launch of {self.framework}\n{''.join(self._comments())}\n{toml_sections(self.job)}"

    def _comments(self) -> Iterator[str]:
        for name in (ASSUMED, UNKNOWN):
            for d in (e.to_dict() for e in self.entries if e.list == name):
                equals = " " if d["argument"] else " = "
                what = f"{d['argument'] or d['key']}{equals}{json.dumps(d['value'])}: "
                text = f"# {name}: {what if d['argument'] or d['key'] else ''}{d['note']}"
                yield re.sub(r"[\x00-\x1f\x7f]", " ", text)[:400] + "\n"


def import_launch(path: str, framework: str | None = None) -> ImportedJob:
    """Read a launch. framework: whose, where the file does not show it.

    Raises PiperError (io): it cannot be read; (job): not in a format that is known; (usage): no such framework.
    """
    file = _overlaid(read_launch(path, framework_named(framework) if framework else None), framework is not None)
    entries = [_entry(file.framework, a) for a in file.arguments]
    stated: Facts = {e.fact: e.said for e in sorted(entries, key=_wins) if e.fact and e.said is not None}
    if "per_node" in stated and not any(e.key == "cluster.nodes" for e in entries):
        stated["nodes"] = 1  # torchrun's default
    d = draft(file.framework, stated | _config(file, stated), _hints(file))
    entries = [_settled(e, d, stated) for e in entries]
    job, entries = _kept(d.job, entries)
    entries += [JobEntry(JobArgument("", v), ASSUMED, k, why) for k, (v, why) in d.filled.items()]
    entries += [JobEntry(JobArgument("", None), ASSUMED, "", why) for why in d.unsaid]
    if file.others:
        note = f"the file starts {file.others + 1} trainings: the one with most arguments is read"
        entries.append(JobEntry(JobArgument("", None), ASSUMED, "", note))
    entries += [JobEntry(JobArgument("", None), UNKNOWN, k, why) for k, why in troubles(file.framework, job)]
    return ImportedJob(file.framework.removesuffix("-torchtitan"), job, tuple(entries))


def _wins(e: JobEntry) -> bool:
    """Whether it holds wherever it stands: of others the last one does."""
    return e.argument.name.lstrip("-").replace("-", "_") in tables()["wins"]


def _settled(e: JobEntry, d: JobDraft, stated: Facts) -> JobEntry:
    """An entry beside all others: what the job says otherwise is assumed, what bears on nothing of it is understood."""
    if e.fact in d.doubts and e.said == stated.get(e.fact):
        return replace(e, list=ASSUMED, note=d.doubts[e.fact])
    p = d.job.get("parallel", {})
    there = {k: p.get(k, 1) > 1 for k in ("tp", "cp", "pp")}
    there |= {"vp": d.job.get("schedule", {}).get("stages_per_rank", 1) > 1}
    there |= {"fp8": d.job.get("precision", {}).get("compute") == "fp8", "zero3": p.get("zero", 3) == 3}
    lacks = [k for k in e.only if not there[k]]
    if e.list == UNDERSTOOD and e.fact and e.said is not None and e.said != stated.get(e.fact):
        flag = e.argument.value is True and e.argument.name.startswith("--")  # two such together are an error
        return replace(e, list=ASSUMED if flag else UNDERSTOOD, note="another argument says otherwise, and wins")
    if e.list == ASSUMED and lacks:
        return replace(e, list=UNDERSTOOD, note=f"nothing in a step depends on it: there is no {lacks[0]}")
    return e


def _overlaid(file: JobFile, named_by_user: bool) -> JobFile:
    """The file with those that it names, each below the one that names it: what is stated later wins."""
    if file.framework == "primus" and any(
        a.value == "torchtitan" for a in file.arguments if a.name.endswith(".framework")
    ):
        file = replace(file, framework="primus-torchtitan")
    below, above = list[JobArgument](), list[JobArgument]()  # DeepSpeed's JSON says what the engine does
    queue, seen, there = [file], {Path(file.path).name}, {Path(file.path).name}
    while queue and len(seen) <= MOST_FILES:
        here = queue.pop(0)
        for name in _named_files(file.framework, here):
            found = None if name in seen else beside(replace(here, inside=file.inside), name, PRIMUS)
            seen.add(name)
            if found is not None:
                there.add(name)
                if file.framework == "megatron" and not named_by_user:
                    file = replace(file, framework=found.framework)
                named = [replace(a, file=name) for a in found.arguments]
                below, above = (below, [*above, *named]) if name.endswith(".json") else ([*named, *below], above)
                queue.append(replace(found, framework=file.framework))
    whole = (*below, *file.arguments, *above)
    return replace(file, arguments=tuple(_found(file.framework, a, there) for a in whole))


def _found(framework: str, a: JobArgument, there: Container[str]) -> JobArgument:
    """An argument that names files, with a doubt where one of them was not read."""
    row = _row(framework, a)
    if row is None or row.how != FILE or not is_set(a.value) or isinstance(a.value, bool):
        return a
    missing = [x for x in map(str, a.value if isinstance(a.value, list) else [a.value]) if x not in there]
    return replace(a, doubt=f"no file beside this one that can be read: {', '.join(missing)}" if missing else "")


def _named_files(framework: str, file: JobFile) -> Iterator[str]:
    for a in file.arguments:
        row = _row(framework, a)
        if (row is not None and row.how == FILE) or a.name in ("extends", "bases"):
            for name in a.value if isinstance(a.value, list) else [a.value]:
                if isinstance(name, str) and 0 < len(name) < 300 and re.search(r"\.(json|toml|ya?ml)$", name):
                    yield name


def _row(framework: str, a: JobArgument) -> JobTableRow | None:
    """An argument's row; files of arguments are named alike by all programs, accelerate's keys are its launcher's."""
    found = row_of(a.place or framework, a.name.removeprefix("ENV_VARS."))
    if found is None and a.place == "launcher":
        found = row_of(framework, a.name)
    return found or next((r for r in [row_of("launcher", a.name)] if r is not None and r.how == FILE), None)


def _entry(framework: str, a: JobArgument) -> JobEntry:
    """One argument looked up in the table."""
    found = _looked_up(framework, a)
    return replace(found, list=ASSUMED, note=a.perhaps) if a.perhaps and found.fact else found


def _looked_up(framework: str, a: JobArgument) -> JobEntry:
    if a.name.startswith("$"):
        return JobEntry(a, ASSUMED, note="not in the file: as if it held no arguments")
    row = _row(framework, a)
    turned = re.sub(r"(?<=\.)no[-_]", "", a.name)  # `section.no-key`, as torchtitan's parser has it
    if row is None and a.value is True and turned != a.name:
        return replace(_looked_up(framework, replace(a, name=turned, value=False)), argument=a)
    if row is None and a.value is None:
        return JobEntry(a, UNDERSTOOD, note="not set")
    if row is None:
        return JobEntry(a, UNKNOWN, note=f"no argument of {framework} that is known")
    key = tables()["keys"].get(row.fact, "")
    name = f"{framework.partition('-')[0]}/{Path(str(a.value)).stem}"  # of a model, as the framework's own file has it
    if a.doubt and row.how == FILE and name in tables()["hub"]:
        return JobEntry(a, ASSUMED, "model.config", f"{a.doubt}: the published model of that name", "hub", name)
    if a.doubt and row.how != INERT:
        return JobEntry(a, UNKNOWN, key, a.doubt)
    if not is_set(a.value) and row.how != FILE:
        return JobEntry(a, UNDERSTOOD, key, "not set")
    if row.how == INERT:
        return JobEntry(a, UNDERSTOOD, key, row.note)
    if row.how.startswith(PRESUMED):
        same = presumed(row.how, a.value)
        only = tuple(w[1:] for w in row.how.split() if w[0] == "@")
        note = row.note if same else f"predicted otherwise: {row.note}"
        return JobEntry(a, UNDERSTOOD if same else ASSUMED, key, note, row.fact, same, only)
    return _read(framework, a, row, key)


def _read(framework: str, a: JobArgument, row: JobTableRow, key: str) -> JobEntry:
    if row.how == FILE:
        return JobEntry(a, UNDERSTOOD, "", row.note if isinstance(a.value, str | list) else "not a file: a flag")
    try:
        said = read_value(row.how, a.value)
    except (ValueError, OverflowError) as e:
        if a.value == "auto" and row.fact == "lr":
            return JobEntry(a, UNDERSTOOD, key, "left to the program that reads it: a step costs the same")
        if a.value == "auto":
            return JobEntry(a, ASSUMED, key, "left to the program that reads it: as if it were not there")
        return JobEntry(a, UNKNOWN, key, f"this is not {e}")
    if row.fact in COUNTED and isinstance(said, int) and not 0 <= said <= MOST:
        return JobEntry(a, UNKNOWN, key, f"this is not a number from 0 to {MOST:,}")
    if row.fact == "pp" and said == 0 and framework == "gpt-neox":  # its word for no pipeline
        said = 1
    if row.fact in DIVIDES and said == 0:
        return JobEntry(a, UNKNOWN, key, "this is not a number from 1")
    return JobEntry(a, UNDERSTOOD, key, row.note, row.fact, said)


def _kept(
    job: Mapping[str, dict[str, Any]], entries: Iterable[JobEntry]
) -> tuple[dict[str, dict[str, Any]], list[JobEntry]]:
    """The job without keys that this release does not have, which makes the arguments that state them unknown."""
    known = {n: keys_of(n) for n in job}
    out = {n: {k: v for k, v in s.items() if n in OPEN or k in known[n]} for n, s in job.items()}
    lost = {f"{n}.{k}" for n, s in job.items() for k in s if k not in out[n]}
    note = "no key of a job says this yet"
    return out, [replace(e, list=UNKNOWN, note=note) if e.key in lost else e for e in entries]


def _hints(file: JobFile) -> dict[str, str]:
    """Words that name what no argument states: the tokenizer, the program, the GPU in the file's path, and whether
    llm-foundry shards.
    """
    tokenizer = " ".join(str(a.value) for a in file.arguments if "tokenizer" in a.name)
    path = "/".join(Path(file.path).parts[-4:]).lower()
    gpu = next(
        (g for g in sorted(gpus(), key=len, reverse=True) if g.split("-")[0] in re.split(r"[^a-z0-9]+", path)), ""
    )
    fsdp = next((a.name for a in file.arguments if a.name.startswith("fsdp_config.")), "")
    return {"tokenizer": tokenizer, "gpu": gpu, "program": file.program, "fsdp": fsdp}


def _config(file: JobFile, stated: Facts) -> Facts:
    """A Hugging Face config that the launch names by path, or that lies beside a file that states no model."""
    name = str(stated.get("hub") or "config.json")
    if (
        "layers" in stated
        or not name.endswith(".json")
        or file.framework not in ("deepspeed", "accelerate", "automodel")
    ):
        return {}
    path = Path(file.path).parent / name
    try:
        raw = read_json(path, FORM)
    except PiperError:
        return {}
    if not isinstance(raw, dict):
        return {}
    table = TYPES.get(str(raw.get("model_type")), {})
    said = {k: v for k, v in raw.items() if k in table and v is not None and k not in LOSSES}
    kept = {k: v for k, v in said.items() if not (table[k].why and not table[k].only)}
    return {"config": kept if _same(kept, raw) else {"config": str(path)}}


def _same(kept: Mapping[str, Any], raw: Mapping[str, Any]) -> bool:
    """Whether a config's own keys say all that it says: older spellings, tables and null may say more."""
    try:
        return config_from({}, "", kept) == config_from(raw, "")  # inline, as the job has them
    except PiperError:
        return False

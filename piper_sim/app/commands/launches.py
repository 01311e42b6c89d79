"""`piper-sim import FILE`, `piper-sim export JOB --to NAME`: launches of frameworks in, files for other tools out."""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping

from ir.core.errors import printable, usage_error
from ir.job.build import blaming, directives_json
from piper_sim.app.captured import load_job
from piper_sim.app.commands.output import dumps, print_json, progress, refuse_existing, write
from piper_sim.formats.chakra import chakra_files
from piper_sim.formats.slurm import sbatch
from piper_sim.formats.tables import parquet_files
from piper_sim.formats.torch_csv import order_csv
from piper_sim.frameworks.exporting import FRAMEWORKS, export_launch, exported_to
from piper_sim.frameworks.importing import ASSUMED, UNDERSTOOD, UNKNOWN, ImportedJob, import_launch
from piper_sim.pricing.prepare import hardware_of, prepare_priced
from piper_sim.report.perfetto import perfetto_gz
from piper_sim.study.explain.marks import marks_of
from piper_sim.study.planned import PlannedJob
from piper_sim.study.predict import planned, simulated

FORMATS = ("torch-csv", "piper-json", "chakra", "perfetto", "slurm", "dataframe")


def import_main(args: argparse.Namespace) -> int:
    """Print the job: TOML with what was assumed as comments, or the object that holds an entry for each argument."""
    found = import_launch(args.file, args.framework)
    if args.json:
        print_json({"schema_version": 1, **found.to_dict()})
    else:
        print(printable(found.to_toml()), end="")
        print(_next(found), file=sys.stderr)
    return 0


def _next(found: ImportedJob) -> str:
    """How much was understood, and what to do with a job."""
    counts = Counter(e.list for e in found.entries if e.argument.name)
    to = f" --to {found.framework}" if found.framework in FRAMEWORKS else ""
    return (
        f"{counts[UNDERSTOOD]} arguments understood, {counts[ASSUMED]} assumed, {counts[UNKNOWN]} unknown (--json)\n"
        "next, with the text above in job.toml, and what is assumed put right there:\n"
        "  piper-sim simulate job.toml\n"
        f"  piper-sim search job.toml{to} --out found"
    )


def export_main(args: argparse.Namespace) -> int:
    """Write the files, say which, and which keys of the job they do not say.

    Raises PiperError (usage): no such format; (job): it cannot say what the job asks for.
    """
    name = exported_to(args.to, FORMATS)
    job = load_job(args.job, args.sets)
    if args.against is not None and name not in FRAMEWORKS:
        raise usage_error("--against", "compares launches of frameworks", "leave it out", FRAMEWORKS)
    before = import_launch(args.against) if args.against is not None else None
    with progress(f"exporting {args.job}"), blaming(job):
        hardware = hardware_of(job)
        p, left_out, changed = planned(job, hardware), dict[str, object](), list[dict[str, object]]()
        if name in FRAMEWORKS:
            made = export_launch(p.prepared, name, lambda read: prepare_priced(read, hardware))
            files: Mapping[str, bytes | str] = made.files
            left_out, changed = dict(made.left_out), made.changed(before) if before else []
        else:
            files = _files(p, name, args)
        refuse_existing(args.out, files, args.force)
        written = write(args.out, files, args.force)
    if args.json:
        paths = [str(path) for path in written]
        print_json({"schema_version": 1, "to": name, "files": paths, "left_out": left_out, "changed": changed})
        return 0
    print("\n".join(f"written: {path}" for path in written))
    for row in changed:
        print("changed: {argument}: {was} -> {now}".format(**row))
    for key, value in left_out.items():
        print(f"left out: {key}: {name} has no word for it; it is read back as {value!r}")
    return 0


def _files(p: PlannedJob, name: str, args: argparse.Namespace) -> Mapping[str, bytes | str]:
    match name:
        case "torch-csv":
            return {"schedule.csv": order_csv(p.prepared)}
        case "piper-json":
            return {"strategy.json": dumps(directives_json(p.prepared.strategy))}
        case "slurm":
            script = sbatch(p.prepared, args.job, args.sets)
            return {"job.sbatch": script.encode("utf-8", "surrogateescape")}  # a path need not be text
    found = simulated(p)
    match name:
        case "chakra":
            return chakra_files(found.plan, found.last_step)
        case "perfetto":
            return {"trace.json.gz": perfetto_gz(found.last_step, marks_of(found, why=False))}
        case _:
            return parquet_files({"trace": found.trace, "memory": found.memory, "breakdown": found.breakdown})

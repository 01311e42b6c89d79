"""`piper-sim plan JOB`: the directives and the plan, program by program."""

import argparse
from itertools import pairwise

from ir.job.build import blaming, directives_json
from ir.plan.text import plan_digest, plan_text
from piper_sim.app.captured import load_job
from piper_sim.app.commands.output import dumps, print_json, progress, refuse_existing, write
from piper_sim.study.predict import predict

FILES = ("plan.txt", "strategy.json")


def main(args: argparse.Namespace) -> int:
    """Print the plan that simulate judges and run executes."""
    job = load_job(args.job, args.sets)
    refuse_existing(args.out, FILES, args.force)
    with progress(f"planning {args.job}"), blaming(job):
        p = predict(job)
        text = plan_text(p.plan)
    directives = directives_json(p.prepared.strategy)
    write(args.out, {"plan.txt": text, "strategy.json": dumps(directives)}, args.force)
    if args.json:
        programs = {str(r): p.plan.texts[a:b] for r, (a, b) in enumerate(pairwise(p.plan.bounds.tolist()))}
        print_json(
            {"schema_version": 1, "directives": directives, "programs": programs, "plan_digest": plan_digest(p.plan)}
        )
    else:
        for d in p.prepared.strategy:
            print(d)
        print()
        print(text, end="")
    return 0

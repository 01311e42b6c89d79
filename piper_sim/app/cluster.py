"""`piper-sim cluster`: a hardware file from what a node says of itself, and a profile from nccl-tests."""

import argparse

from cost_models.profile.file import profile_text
from piper_sim.app.commands.output import dumps, print_json, refuse_existing, write
from piper_sim.study.calibrate.cluster import check_nodes, cluster_links
from piper_sim.study.calibrate.nccl_tests import read_nccl_tests

FILES = ("hardware.json", "links.json", "cluster.toml")


def main(args: argparse.Namespace) -> int:
    """Print what was read, assumed and not understood; write the files under --out."""
    refuse_existing(args.out, FILES, args.force)
    nodes = check_nodes(args.nodes)
    found = cluster_links(args.gpu, args.topo, args.ibstat, args.oversubscription)
    profile = read_nccl_tests(args.nccl_tests) if args.nccl_tests else None
    files: dict[str, bytes | str] = {"hardware.json": dumps(found.file())}
    lines = ["[cluster]", 'gpu = "hardware.json"', f"nodes = {nodes}"]
    if profile is not None:
        files["links.json"] = profile_text(profile)
        lines += ["[costs]", 'profile = "links.json"']
        found.read.append({"what": "costs.profile", "value": len(profile.links), "note": "nccl-tests: sizes timed"})
    else:
        found.takes("nvlink_efficiency", "no --nccl-tests: modelled")
        found.takes("nic_efficiency", "no --nccl-tests: modelled")
    files["cluster.toml"] = "\n".join(lines) + "\n"
    write(args.out, files, args.force)
    lists = {"read": found.read, "assumed": found.assumed, "unknown": found.unknown}
    if args.json:
        print_json({"schema_version": 1, "hardware": found.file(), "nodes": nodes, **lists})
        return 0
    for title, rows in lists.items():
        for row in rows:
            print(f"{title:8}  {row['what']} = {row['value']}: {row['note']}")
    print(f"\n{dumps(found.file())}" if args.out is None else f"\nwritten to {args.out}/: {', '.join(files)}")
    return 0

"""`python -m executor.launch.on_ray JOB --ranks N …`: `-m executor` on a Ray cluster, one process for each rank.

Takes the flags of `-m executor`, the number of ranks, and where the cluster is. Ranks of a node are neighbours, and
every node must see the same folders and Python. With nccl each rank holds a GPU. One object is printed: the
run's, or the first failure's; a node that is lost is named by those that are left.
"""

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from executor.launch.torchrun import RankParser, flags, report
from ir.core.errors import ErrorKind, PiperError


def parser() -> argparse.ArgumentParser:
    """What is not a flag of `-m executor`."""
    p = RankParser(prog="python -m executor.launch.on_ray", description=__doc__, allow_abbrev=False)
    p.add_argument("--ranks", type=int, required=True, metavar="N", help="processes, one for each rank")
    p.add_argument("--address", default="auto", metavar="HOST:PORT", help="the cluster's (default: that of this node)")
    return p


def environments(nodes: Sequence[str]) -> tuple[list[int], list[dict[str, str]]]:
    """(processes in the order of their ranks, what torchrun would tell each), by the nodes on which they are.

    >>> order, told = environments(["b", "a", "b"])
    >>> order, [t["LOCAL_RANK"] + "/" + t["LOCAL_WORLD_SIZE"] for t in told]
    ([0, 2, 1], ['0/2', '1/2', '0/1'])
    """
    first = {node: at for at, node in reversed(list(enumerate(nodes)))}
    order = sorted(range(len(nodes)), key=lambda at: (first[nodes[at]], at))
    here, seen = Counter(nodes), Counter[str]()
    told = []
    for rank, at in enumerate(order):
        node = nodes[at]
        local = {"LOCAL_RANK": str(seen[node]), "LOCAL_WORLD_SIZE": str(here[node])}
        told.append({"RANK": str(rank), "WORLD_SIZE": str(len(nodes)), **local})
        seen[node] += 1
    return order, told


class RankProcess:
    """A rank's place on the cluster; a Ray actor. The rank is a process of its own: it ends without a farewell."""

    def place(self) -> tuple[str, str, int]:
        """This node's name and address, and a port that is free there."""
        import ray

        context = ray.get_runtime_context()
        with socket.socket() as s:
            s.bind(("", 0))
            return context.get_node_id(), ray.util.get_node_ip_address(), s.getsockname()[1]

    def life(self, args: Sequence[str], told: Mapping[str, str], folder: str) -> tuple[int, str]:
        """The rank's exit code, and what it printed."""
        line = [sys.executable, "-m", "executor", *args]
        done = subprocess.run(line, env={**os.environ, **told}, cwd=folder, stdout=subprocess.PIPE, text=True)
        return done.returncode, done.stdout


def main(argv: Sequence[str]) -> int:
    """Start the ranks and wait for them; returns the exit code of `-m executor`."""
    try:
        own, args = parser().parse_known_args(list(argv))
        ends = _lives(own.ranks, own.address, args, gpus=int(flags().parse_args(args).backend == "nccl"))
    except PiperError as error:
        report(error)
        return error.kind.exit_code
    said = [line for _, text in ends for line in text.splitlines() if line.startswith("{")]
    found = next((s for s in said if "error" in json.loads(s)), said[0] if said else "")
    if found:
        print(found, flush=True)
    codes = [code for code, _ in ends if code]
    return codes[0] if codes else 0


def _lives(ranks: int, address: str, args: Sequence[str], gpus: int) -> list[tuple[int, str]]:
    """How each rank ended, in their order. gpus: of each. Raises PiperError (usage): no Ray, or too small a cluster."""
    try:
        import ray
    except ImportError:
        raise _refusal("Ray is not installed", "pip install 'piper-sim[ray]'") from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise _refusal(f"no Ray cluster at {address}: {error}", "ray start --head; or --address") from None
    kind = "GPU" if gpus else "CPU"
    if (there := int(ray.cluster_resources().get(kind, 0))) < ranks:
        raise _refusal(f"{ranks} ranks on a cluster of {there} {kind}s", f"a cluster with at least {ranks}")
    group = ray.util.placement_group([{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}] * ranks, strategy="PACK")
    ray.get(group.ready())
    bundles = [
        ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
        for i in range(ranks)
    ]
    Actor: Any = ray.remote(RankProcess)
    actors = [Actor.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=b).remote() for b in bundles]
    places = ray.get([a.place.remote() for a in actors])
    order, told = environments([node for node, *_ in places])
    _, host, port = places[order[0]]
    meet = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    lives = [actors[at].life.remote(args, {**env, **meet}, os.getcwd()) for at, env in zip(order, told, strict=True)]
    return [_end(ray, life) for life in lives]


def _end(ray: Any, life: Any) -> tuple[int, str]:
    try:
        code, text = ray.get(life)
    except ray.exceptions.RayError:  # its node is gone
        return ErrorKind.RANK_FAILED.exit_code, ""
    return code, text


def _refusal(message: str, fix: str) -> PiperError:
    return PiperError(ErrorKind.USAGE, message, key="python -m executor.launch.on_ray", suggestion=fix)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

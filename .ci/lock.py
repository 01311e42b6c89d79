"""The tests' packages with their hashes: `lock.py write REPORT`, from pip's report; `lock.py check`, by the project.

PyTorch is not in it: which build of it one has is the index's to say, and each build has other bytes. Its version is
pinned in constraints-cpu.txt. The hashes are of the files that pip takes on Linux x86_64 under Python 3.11.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK, CONSTRAINTS = ROOT / "requirements.lock", ROOT / "constraints-cpu.txt"
PINNED = re.compile(r"^([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}$")
APART = {"torch", "piper-sim"}


def write(report: str) -> int:
    """The lock, from `pip install --dry-run --ignore-installed --report`."""
    found = json.loads(Path(report).read_text("utf-8"))["install"]
    lines = []
    for item in found:
        name = canonicalize_name(item["metadata"]["name"])
        if name not in APART and not name.startswith(("nvidia-", "cuda-", "triton")):
            digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:{digest}")
    LOCK.write_text("\n".join(sorted(lines)) + "\n", "utf-8")
    return check()


def check() -> int:
    """1 where the lock lacks what the project asks for, or has it in a version that it does not take."""
    bad = [
        f"not name==version --hash=sha256:…: {x}" for x in LOCK.read_text("utf-8").splitlines() if not PINNED.match(x)
    ]
    has = {m[1]: m[2] for x in LOCK.read_text("utf-8").splitlines() if (m := PINNED.match(x))}
    words = (line.partition("#")[0].strip() for line in CONSTRAINTS.read_text("utf-8").splitlines())
    pins = {r.name: r for r in map(Requirement, filter(None, words))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    for wanted in map(Requirement, [*project["dependencies"], *extras["exec"], *extras["dev"]]):
        name = canonicalize_name(wanted.name)
        if name in APART:
            pin = next((s.version for s in pins[name].specifier), "") if name in pins else ""
            if pin not in wanted.specifier:
                bad.append(f"{CONSTRAINTS.name} pins {name} {pin or 'not at all'}, the project wants {wanted}")
        elif name not in has:
            bad.append(f"{LOCK.name} lacks {wanted}")
        elif has[name] not in wanted.specifier:
            bad.append(f"{LOCK.name} has {name} {has[name]}, the project wants {wanted}")
    bad += [
        f"{LOCK.name} has {n} {has[n]}, {CONSTRAINTS.name} {r}"
        for n, r in pins.items()
        if n in has and has[n] not in r.specifier
    ]
    print("\n".join(bad) or f"{LOCK.name} agrees with the project: {len(has)} packages")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(write(sys.argv[2]) if sys.argv[1] == "write" else check())

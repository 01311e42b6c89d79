"""What a save asks of the disk and says while it does, in order; what it leaves; what is said where it cannot be.

One process looks after all ranks, one by one. The order is checked by a rule of its own, and held by golden files.
"""

import errno
import fcntl
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from executor.checkpoint import __main__ as lister
from executor.checkpoint import folder as folder_module
from executor.checkpoint import keeper as keeper_module
from executor.checkpoint import manifest as manifest_module
from executor.checkpoint import tensors as tensors_module
from executor.checkpoint.folder import CheckpointLock, complete
from executor.checkpoint.keeper import RankCheckpoint
from executor.checkpoint.manifest import read_manifest, verify
from executor.checkpoint.settings import settled, verified
from ir.core.errors import PiperError
from ir.job.run_options import CheckpointOptions
from tests.executor.checkpoint.checkpoints import Alone, State, drawn
from tests.executor.runs import judged

Golden = Callable[[str, str], None]
SETS = "parallel.pp=1", "parallel.dp=2", "parallel.zero=2", "schedule.microbatches=2", "model.num_hidden_layers=1"
SLOTS = "weight", "exp_avg", "exp_avg_sq"
FLAGS = {os.O_EXCL: "new", os.O_CREAT: "made", os.O_CLOEXEC: "kept here", os.O_RDWR: "both ways", os.O_DIRECTORY: "dir"}


class Disk:
    """What is asked of the disk below a folder, one line each. full: the line at which there is no room."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, full: int = -1) -> None:
        self.folder, self.lines, self.full = folder, list[str](), full
        self._rename = os.rename
        for module, names in {
            os: ("write", "pwrite", "fsync", "ftruncate", "close", "open"),
            fcntl: ("flock",),
        }.items():
            for name in names:
                monkeypatch.setattr(module, name, partial(self._asked, getattr(module, name), name))
        for name in ("rename", "unlink", "mkdir", "rmdir"):
            monkeypatch.setattr(os, name, partial(self._named, getattr(os, name), name))
        monkeypatch.setattr(io, "open", partial(self._opened, io.open))
        monkeypatch.setattr(folder_module, "_exchanged", self._exchanged)

    def note(self, line: str) -> None:
        at, self.full = self.full, self.full - (line[0] != " " and not line.startswith("close"))
        if at == self.full + 1 == 1:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} at {line.replace(str(self.folder), '.')}")
        self.lines.append(re.sub(r'"pid":\d+,"host":"[^"]*"', "", line.replace(str(self.folder), ".")))

    def _asked(self, real: Any, name: str, at: Any, *more: Any, **named: Any) -> Any:
        path = at if isinstance(at, str | Path) else ""
        with suppress(OSError, TypeError):
            path = path or os.readlink(f"/proc/self/fd/{at}")
        if str(path).startswith(str(self.folder)):
            given = [x if not isinstance(x, memoryview) else f"{len(x)} bytes" for x in more]
            if name == "open":
                given = [word for flag, word in FLAGS.items() if more[0] & flag == flag]
            self.note(f"{name} {path} {' '.join(map(str, given))}")
        return real(at, *more, **named)

    def _named(self, real: Any, name: str, *given: Any, **named: Any) -> Any:
        if named.get("dir_fd") is None and str(given[0]).startswith(str(self.folder)):
            self.note(f"{name} {' '.join(map(str, given))}")
        return real(*given, **named)

    def _exchanged(self, a: Path, b: Path) -> bool:
        """As it is on any file system."""
        self.note(f"exchange {a} {b}")
        for one, other in ((a, f"{a}.by"), (b, a), (f"{a}.by", b)):
            self._rename(one, other)
        return True

    def _opened(self, real: Any, file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
        if str(file).startswith(str(self.folder)):
            self.note(f"file {file} {mode}")
        return real(file, mode, *more, **named)


class Pen(Alone):
    """A rank's progress and transport, and the board that all see, noted where the disk's lines are."""

    def __init__(self, disk: Disk, rank: int, board: dict[str, str]) -> None:
        self.note, self.board = (lambda line: disk.note(f"  rank {rank} {line}")), board

    def barrier(self) -> None:
        self.note("meets the others")

    def op(self, index: int, text: str) -> None:
        self.note(f"is at {text} ({index})")

    def wait(self, peers: Any = (), text: str | None = None) -> None:
        self.note(f"waits at {text} {list(peers)}")

    def go_on(self) -> None:
        self.note("lives")

    def set(self, key: str, value: str) -> None:
        self.note(f"tells all: {key} {value}")
        self.board[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(k in self.board for k in keys)

    def get(self, key: str) -> bytes:
        return self.board[key].encode()


def life(state: State, disk: Disk, steps: int, stop: int | None = None, gone: bool = False, **flags: Any) -> None:
    """A run that saves, from its first step of `steps` to its last. stop: the step ahead of which it is asked to."""
    saving, board = CheckpointOptions(save=str(disk.folder), **flags), dict[str, str]()
    pens: list[Any] = [Pen(disk, rank, board) for rank in range(len(state.syncs))]
    held = zip(state.syncs, state.held, pens, strict=True)
    keepers = [RankCheckpoint(saving, state.prepared, state.plan, r, s, h, p) for r, (s, h, p) in enumerate(held)]
    for keeper, pen in zip(keepers, pens, strict=True):
        keeper.begin(pen, pen)
    for step in range(saving.first, steps):
        if step == stop:
            (disk.folder / "stop").touch()
        for keeper in keepers:
            keeper.before(step)
        if gone:  # by whoever asked
            (disk.folder / "stop").unlink(missing_ok=True)
        ends = []
        for keeper, pen in reversed(
            [*zip(keepers, pens, strict=True)]
        ):  # rank 0 last: it finds what others have written
            ends.append(keeper.after(step + 1, steps, pen))
        disk.note(f"  step {step} is done: {ends}, {[str(k.saved) for k in keepers]}")
        if any(ends):
            break
    for keeper, pen in reversed([*zip(keepers, pens, strict=True)]):
        keeper.close(pen)


def test_a_run_that_saves_nothing_heeds_no_file_called_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State.of(tmp_path / "job", *SETS)
    monkeypatch.chdir(tmp_path)
    Path("stop").touch()
    pen: Any = Pen(Disk(tmp_path / "saved", monkeypatch), 0, {})
    keeper = RankCheckpoint(CheckpointOptions(), state.prepared, state.plan, 0, state.syncs[0], state.held[0], pen)
    keeper.begin(pen, pen)
    keeper.before(0)
    assert not keeper.after(1, 9, pen) and Path("stop").exists()


def rule(lines: list[str]) -> list[str]:
    """What gets a checkpoint's name before all its bytes, and then its own names, are on the disk."""
    dirty, wrong = set[str](), list[str]()
    for word, path, *more in (line.split(" ", 2) for line in lines if line[0] != " "):
        if word == "rename" and ".tmp-" in path and re.search(r"step-\d+$", more[0]):
            wrong += [f"{d} before {more[0]}" for d in sorted(dirty) if d.startswith(path)]
        if word in ("rename", "unlink", "mkdir", "file", "write") or (word == "open" and "made" in more[0]):
            dirty = (dirty - {path}) | {path.rpartition("/")[0]} | ({path} if word in ("file", "write") else set())
        if word == "fsync":
            dirty.discard(path)
    return wrong


LIVES: dict[str, list[dict[str, Any]]] = {
    "keeps two": [dict(steps=4, every=1)],
    "goes on": [dict(steps=2, every=2), dict(steps=3, resume="step-000002", first=2, keep=1, run="one")],
    "is asked to stop": [dict(steps=5, every=3, stop=1), dict(steps=4, force=True, stop=0, gone=True)],
    "by force": [dict(steps=3, every=2), dict(steps=3, keep=1, force=True)],
}


@pytest.mark.parametrize("name", LIVES)
@pytest.mark.parametrize("behind", [False, True])
def test_what_a_save_asks_of_the_disk(
    name: str, behind: bool, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State.of(tmp_path / "job", *SETS, f"run.save_behind={str(behind).lower()}")
    state.fill(drawn(state, SLOTS, torch.float64))
    monkeypatch.setattr(keeper_module, "FILE_BYTES", 500_000)
    monkeypatch.setattr(manifest_module, "THREADS", 1)
    monkeypatch.setattr(keeper_module._CheckpointBehind, "start", lambda self: self.run())  # before the step goes on
    monkeypatch.setattr(keeper_module._CheckpointBehind, "is_alive", _looked_at)
    monkeypatch.setattr(keeper_module._CheckpointBehind, "join", lambda self, seconds: None)
    monkeypatch.setattr(tensors_module, "STRETCH", 200_000)
    names = iter(("aaaa", "bbbb"))
    monkeypatch.setattr(keeper_module.uuid, "uuid4", lambda: type("Named", (), {"hex": next(names)}))
    folder = tmp_path / "saved"
    (folder / "step-000007.tmp-gone").mkdir(parents=True)
    (folder / "step-000007.tmp-gone" / "rank-00000.safetensors").touch()
    with monkeypatch.context() as patch:
        disk = Disk(folder, patch)
        for n, given in enumerate(LIVES[name]):
            resume = {"resume": str(folder / given["resume"])} if "resume" in given else {}
            disk.note(f"run {n}")
            life(state, disk, **{**given, **resume})
    assert not rule([x for x in disk.lines if not x.startswith("run ")])
    golden(f"disk, {name}{', behind' * behind}.txt", "\n".join(disk.lines) + "\n")


def _looked_at(self: Any) -> bool:
    """A thread that lives for four looks, and waits for others in the third."""
    self.looks = getattr(self, "looks", 0) + 1
    self.waits = self.looks == 3
    return bool(self.looks < 5)


def test_a_lock_that_is_freed_soon_is_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = CheckpointLock(tmp_path)
    monkeypatch.setattr(folder_module.time, "sleep", lambda seconds: lock.free())
    CheckpointLock(tmp_path).free()


def test_wherever_the_disk_is_full_it_is_told_and_what_was_complete_stays(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, said = State.of(tmp_path / "job", *SETS), list[str]()
    state.fill(drawn(state, SLOTS, torch.float64))
    first = state.save(tmp_path / "first", 1, run="one").parent
    monkeypatch.setattr(folder_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(manifest_module, "THREADS", 1)
    monkeypatch.setattr(keeper_module.uuid, "uuid4", lambda: type("Named", (), {"hex": "aaaa"}))
    for n in range(1, 200):
        folder, words = Path(shutil.copytree(first, tmp_path / f"{n}")), "done"
        with monkeypatch.context() as patch:
            disk = Disk(folder, patch, n)
            try:
                life(state, disk, 2, resume=str(folder / "step-000001"), first=1, keep=1, run="one")
            except (OSError, PiperError) as error:
                assert isinstance(error, PiperError), disk.lines
                words = re.sub(
                    r"\"pid\".*\"}",
                    "",
                    f"{type(error).__name__} {error}".replace(str(folder), ".").replace("\n", "\n  "),
                )
        found = complete(folder)
        for path in found.values():
            verify(path, manifest := read_manifest(path), manifest.files)
        assert found and (words != "done" or 2 in found)
        said.append(f"{n}: {words}, {[*found]}\n")
        shutil.rmtree(folder)
        if disk.full > 0:
            break
    assert words == "done" and len(said) > 40
    golden("full.txt", "".join(said))


def test_a_name_before_its_bytes_is_seen() -> None:
    good = ["write ./a.tmp-b/x 5 bytes", "fsync ./a.tmp-b/x ", "fsync ./a.tmp-b ", "rename ./a.tmp-b ./step-000001"]
    assert not rule(good) and all(rule(good[:k] + good[k + 1 :]) for k in (1, 2))


# -- what is said -----------------------------------------------------------------------------------------------------

JOBS = [  # the one that was saved, and those that train something else
    (), ("model.num_hidden_layers=2",), ("model.vocab_size=128",), ("model.rope_theta=500", "model.seq_len=16"),
    ("schedule.microbatches=8",), ("schedule.microbatches=3", "schedule.microbatch_size=3"), ("data.seed=3",),
    ("data.source=job.toml",), ("optimizer.name=sgd",), ("precision.compute=fp32",), ("model.seq_len=16",),
    ("precision.compute=fp32", "precision.params=fp32", "precision.optimizer=fp32"),
    ("model.tie_word_embeddings=true", "model.num_key_value_heads=4"), ("precision.optimizer=fp32",),
]  # fmt: skip
FOLDERS = ("saved", "saved/step-000004", "saved/step-000002", "", "none", "empty", "half", "file", "taken", "other")
EDITS: list[Callable[[dict[str, Any]], object]] = [
    lambda t: t["files"].popitem(),
    lambda t: t["training"]["slots"].append("x"),
    lambda t: t["training"].update(length=7, format="fp32"),
    lambda t: t["training"]["model"].update(layers=9),
    lambda t: t["training"].update(tokens=5, data="abc"),
    lambda t: t["job"]["data"].update(source="there.txt") or t["training"].update(tokens=9),
    lambda t: t["parameters"].popitem(),
    lambda t: t.update(step=0),
    lambda t: t.update(run="other", schema_version=3),
]


def folders(root: Path) -> State:
    """What a run may find where it is to save, or to go on."""
    state = State.of(root / "job", *SETS)
    state.fill(drawn(state, SLOTS, torch.float64))
    for step in (2, 4):
        state.save(root / "saved", step, run="one", keep=9, force=True)
    shutil.copytree(root / "saved", root / "other")
    (root / "other" / "step-000004" / "manifest.json").unlink()
    for path in ("empty", "half/step-000002.tmp-abc", "taken/step-000003.tmp-abc", "taken/a", "taken/b", "taken/c"):
        (root / path).mkdir(parents=True)
    for path in ("file", "taken/thesis.tex", "half/stop", "half/lock"):
        (root / path).touch()
    return state


def edited(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest that somebody has changed who can count."""
    table = json.loads((checkpoint / "manifest.json").read_text())
    change(table)
    text = json.dumps(table)
    with suppress(ValueError):
        table["sha256"] = keeper_module.msgspec.json.decode(text, type=keeper_module.CheckpointManifest).own_digest
    (checkpoint / "manifest.json").write_text(json.dumps(table))


def asked(rng: Random, root: Path) -> dict[str, Any]:
    """Flags that somebody gives."""
    found = {
        "save": rng.choice((None, *FOLDERS)),
        "resume": rng.choice((None, "saved", "saved", *FOLDERS, "if-present")),
    }
    where = {k: str(root / v) if v != "if-present" else v for k, v in found.items() if v is not None}
    numbers = {k: rng.choice((*[None] * 7, 0, 2)) for k in ("every", "keep")}
    return where | numbers | {"force": rng.random() < 0.3}


def test_what_is_said_to_whoever_saves_or_resumes(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder_module, "PATIENCE_S", 0.0)
    state, said = folders(tmp_path), list[str]()
    jobs = [judged(tmp_path / "job", *SETS, *sets)[0] for sets in JOBS]

    def tell(what: str, act: Callable[[], object]) -> None:
        try:
            words = str(act())
        except PiperError as error:
            words = f"{error.kind} {error}"
        said.append(f"{what}: {words}".replace(str(tmp_path), ".").replace("\n", "\n  "))

    for n in range(160):
        rng = Random(n)
        given, real, steps = asked(rng, tmp_path), rng.random() < 0.9, rng.choice((4, 5, 9))
        tell(f"{given} {steps} {real}", lambda: settled(CheckpointOptions(**given), state.prepared, steps, real=real))  # noqa: B023
    resume = CheckpointOptions(resume=str(tmp_path / "saved"))
    tell("verified", lambda: (verified(settled(resume, state.prepared, 9, real=True)), verified(CheckpointOptions())))
    for sets, job in zip(JOBS, jobs, strict=True):
        tell(f"{sets}", lambda: settled(resume, job, 9, real=True))  # noqa: B023
    for n, change in enumerate(EDITS):
        copy = Path(shutil.copytree(tmp_path / "saved", tmp_path / f"copy{n}"))
        edited(copy / "step-000004", change)
        tell(f"edit {n}", lambda: settled(replace(resume, resume=str(copy)), state.prepared, 9, real=True))  # noqa: B023
        tell(f"listed {n}", lambda: (lister.main([str(copy)]), *capfd.readouterr()))  # noqa: B023
    hub = ["--hub", str(tmp_path / "hub"), "--dtype", "bf16"]
    tell("for the Hub", lambda: (lister.main([str(tmp_path / "saved"), *hub]), *capfd.readouterr()))
    monkeypatch.setenv("COLUMNS", "120")
    for argv in ([], ["-h"]):
        with pytest.raises(SystemExit):
            lister.main(argv)
        said.append(" ".join("".join(capfd.readouterr()).split()))
    golden("said.txt", re.sub(r"process \d+ on \S+", "process 1 on here", "\n".join(said)) + "\n")


# -- what is left -----------------------------------------------------------------------------------------------------

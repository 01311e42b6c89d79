"""Every format: a valid file of it, and what reads it. Files that lie in `seeds/` are valid as they are."""

import contextlib
import io
import json
import shlex
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from cost_models.hardware import load_hardware
from cost_models.profile.file import load_profile
from cost_models.software import load_software
from cost_models.software.dispatcher import read_dispatchers
from executor.checkpoint import reader
from executor.checkpoint.folder import said
from executor.checkpoint.manifest import CheckpointManifest, check_files, read_manifest, verify
from executor.checkpoint.tensors import FORM as FILES
from executor.checkpoint.tensors import MANIFEST, digest_of
from executor.data.files import check_vocabulary
from executor.data.tokens import FileTokens
from executor.modules.hub_weights import INDEX, WHOLE, HubCheckpoint
from executor.parallel.shares import ParamShard
from ir.core.errors import ErrorKind, PiperError
from ir.core.files import check_regular, read_bytes
from ir.directives.load import load_strategy
from ir.job import load_job
from ir.job.build import prepare
from ir.job.load import job_from
from ir.job.routing.counts import ExpertLayer
from ir.job.routing.recorded import read_counts
from ir.plan.read import read_plan
from ir.plan.text import plan_text
from ir.schedules.custom import from_csv
from ir.trace.text import read_trace
from ir.workload.captured import load_captured
from ir.workload.config.load import load_config
from piper_sim.app.cli import main
from piper_sim.frameworks.importing import import_launch
from piper_sim.study.calibrate.nccl_tests import read_nccl_tests
from piper_sim.study.calibrate.pairs import read_pairs
from piper_sim.study.calibrate.trace_events import read_trace_file
from piper_sim.study.explain.kineto import FORM as TRACES
from piper_sim.study.explain.kineto import read_traces
from piper_sim.study.explain.measured import explain_traces
from piper_sim.study.history.table import read_runs
from tests.executor.checkpoint.checkpoints import State
from tests.piper_sim.study.calibrate.nccl_text import table

ROOT = Path(__file__).parents[2]
SEEDS = Path(__file__).with_name("seeds")
JOB = str(SEEDS / "job.toml")
ALL = ("file", "key", "allowed")
Read = Callable[[Path], object]


@dataclass(frozen=True)
class Format:
    """name: of the file. seed: a valid one. read: answers with a value, or a PiperError. share: of all cases, to
    others'. said: what an error must name.
    """

    name: str
    seed: bytes
    read: Read
    share: float = 1.0
    said: tuple[str, ...] = ALL

    @property
    def file(self) -> str:
        """The file's own name: behind the colon of a command's."""
        return self.name.rpartition(":")[2]


@cache
def formats() -> tuple[Format, ...]:
    """All of them; valid files that are not in `seeds/` are made here."""
    return (
        *_of_jobs(),
        *_of_costs(),
        *_of_runs(),
        *_launches(),
        *_checkpoints(),
        *_weights(),
        *_tokens(),
        *_commands(),
    )


def _seed(name: str, read: Read, **more: Any) -> Format:
    return Format(name, (SEEDS / name).read_bytes(), read, **more)


def _of_jobs() -> Iterator[Format]:
    prepared = prepare(job_from({"model": {"config": "tiny-moe", "seq_len": 64}, "parallel": {"pp": 2}}))
    plan, moe = prepared.plan(), load_config("tiny-moe").moe
    assert moe is not None
    layers = [ExpertLayer(i, prepared.base.entries[0], 8) for i in range(4)]

    def counts(path: Path) -> object:
        job = job_from({"model": {"config": "x"}, "routing": {"kind": "file", "file": str(path)}})
        return read_counts(job, moe, layers, 1, 1)

    yield _seed("job.toml", load_job, share=2)
    yield _seed("search.toml", load_job, share=2)
    yield _seed("set.txt", lambda p: load_job(JOB, _words(p).split("\n")[:-1]), said=ALL[1:])
    yield _seed("config.json", lambda p: load_config(str(p)), share=2)
    yield _seed("model.json", load_captured)
    yield _seed("schedule.csv", from_csv)
    yield _seed("strategy.json", load_strategy)
    yield _seed("routing.csv", counts)
    yield Format("plan.txt", plan_text(plan).encode(), lambda p: read_plan(p, plan.graph))


def _of_costs() -> Iterator[Format]:
    costs = ROOT / "cost_models"
    yield Format("hardware.json", (costs / "hardware/h100-sxm.json").read_bytes(), load_hardware)
    yield _seed("based.json", load_hardware)
    yield Format("software.json", (costs / "software/megatron.json").read_bytes(), lambda p: load_software(str(p)))
    yield Format("dispatchers.toml", (costs / "software/dispatchers.toml").read_bytes(), read_dispatchers)
    yield _seed("profile.json", load_profile)


def _of_runs() -> Iterator[Format]:
    nccl = table("all_reduce", lambda n: 1e-5 + n / 1e11, sizes=[2**k for k in range(10, 16)]).encode()
    yield _seed("kineto.json", lambda p: (read_trace_file(str(p), bool), _explained(p)))
    yield _seed("trace.tsv", lambda p: (read_trace(p), _explained(p)))
    yield Format("all_reduce.txt", nccl, lambda p: read_nccl_tests([str(p)]))
    yield _seed("pairs.csv", lambda p: read_pairs(str(p)))
    yield _seed("history.csv", read_runs)


def _explained(path: Path) -> object:
    with TRACES.naming(path):
        return explain_traces(read_traces([str(path)]))


def _launches() -> Iterator[Format]:
    names = ("megatron.sh", "deepspeed.sh", "megatron.log", "args.txt", "deepspeed.json", "torchtitan.toml")
    yields = ("models", "nemo", "megatron-bridge", "accelerate", "primus", "llm-foundry", "gpt-neox", "automodel")
    for name in (*names, *(f"{n}.yaml" for n in yields)):
        yield _seed(name, lambda p: import_launch(str(p)).to_toml(), share=0.15)


def _checkpoints() -> Iterator[Format]:
    with tempfile.TemporaryDirectory() as name:
        folder = State.of(Path(name) / "run").save(Path(name) / "saved", 2)
        files = {p.name: p.read_bytes() for p in folder.iterdir()}
    tensors = next(n for n in files if n != MANIFEST)

    def read(path: Path) -> object:
        """What resuming from a folder reads: as it is, then with a digest for whoever wrote what is in it."""
        for other, data in files.items():
            if other != path.name:
                (path.parent / other).write_bytes(data)
        try:
            return _read_checkpoint(path.parent)
        except PiperError:
            _seal(path.parent)
            return _read_checkpoint(path.parent)

    yield Format(MANIFEST, files[MANIFEST], read, share=0.1)
    yield Format(tensors, files[tensors], read, share=0.1)
    yield _seed("lock.json", _locked)
    yield from _weights()


def _locked(path: Path) -> object:
    (path.parent / "lock").unlink(missing_ok=True)
    (path.parent / "lock").symlink_to(path)
    return said(path.parent)


def _read_checkpoint(folder: Path) -> object:
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    verify(folder, manifest, manifest.files)
    return reader.digests(folder, manifest)


def _seal(folder: Path) -> None:
    """Put the digests of what lies there into the manifest, where it is one."""
    import msgspec

    with contextlib.suppress(ValueError, TypeError, KeyError, OSError, RecursionError, PiperError):
        check_regular(folder / MANIFEST, FILES)
        tree = json.loads((folder / MANIFEST).read_bytes())
        for name in tree["files"]:
            check_regular(folder / name, FILES)
            found = digest_of(folder / name)
            tree["files"][name] = {"bytes": found.bytes, "sha256": found.sha256}
        found = msgspec.json.decode(json.dumps(tree), type=CheckpointManifest)
        (folder / MANIFEST).write_bytes(found.text())


def _weights() -> Iterator[Format]:
    from safetensors.torch import save

    shapes: dict[str, tuple[int, ...]] = {"a": (2, 3), "b.weight": (4,)}
    part, data = "model-00001-of-00001.safetensors", save({n: torch.ones(s) for n, s in shapes.items()})
    index = json.dumps({"metadata": {"total_size": 40}, "weight_map": dict.fromkeys(shapes, part)}).encode()

    def read(path: Path) -> object:
        (path.parent / part).write_bytes(data)  # which a whole file beside it goes before
        found = HubCheckpoint(path.parent)
        found.check(shapes, {})
        return [found.read(n, ParamShard(s), torch.float32) for n, s in shapes.items()]

    for name, start in ((WHOLE, data), (INDEX, index)):
        yield Format(name, start, read, share=0.3)


def _tokens() -> Iterator[Format]:
    tokens, whole = np.arange(40, dtype="<u2"), io.BytesIO()
    np.save(whole, tokens)
    index = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + bytes([8]) + np.array([2, 3], "<u8").tobytes()
    index += np.array([16, 24], "<i4").tobytes() + np.array([0, 32], "<i8").tobytes()
    index += np.array([0, 1, 2], "<i8").tobytes()

    def read(path: Path, beside: bytes = b"", end: str = "") -> object:
        if end:
            path.with_suffix(end).write_bytes(beside)
        path = path.with_suffix(".bin") if path.suffix == ".idx" else path
        found = FileTokens(str(path), 512)
        check_vocabulary(found.tokens, str(path), 512)
        return found.sequence(0, 0, 16)

    yield Format("tokens.npy", whole.getvalue(), read)
    yield Format("tokens.uint16", tokens.tobytes(), read, share=0.5)
    yield Format("words.txt", b"to be or not to be, that is the question\n" * 2, read, share=0.5)
    yield Format("tokens.idx", index, lambda p: read(p, tokens.tobytes(), ".bin"))
    yield Format("tokens.bin", tokens.tobytes(), lambda p: read(p, index, ".idx"), share=0.5)


COMMANDS = {
    "simulate:job.toml": "simulate {}",
    "plan:strategy.json": "plan {job} --set schedule.directives={} --set schedule.microbatches=2",
    "simulate:hardware.json": "simulate {job} --set cluster.gpu={}",
    "simulate:software.json": "simulate {job} --set costs.software={}",
    "simulate:profile.json": "simulate {job} --set costs.profile={}",
    "simulate:config.json": "simulate {job} --set model.config={} --set parallel.layers=balanced",
    "simulate:model.json": "simulate {seeds}/graph.toml --set model.graph={}",
    "simulate:routing.csv": "simulate {job} --set routing.kind=file --set routing.file={} --set parallel.dp=1 "
    "--set parallel.ep=1 --set schedule.microbatches=1 --set model.seq_len=8",
    "simulate:history.csv": "simulate {job} --set history.file={} --set parallel.layers=balanced",
    "plan:schedule.csv": "plan {job} --set schedule.csv={} --set schedule.microbatches=2",
    "compare:job.toml": "compare {} --schedules gpipe,zbv",
    "search:search.toml": "search {} --budget 0.01",
    "explain:job.toml": "explain {}",
    "explain:trace.tsv": "explain --trace {}",
    "explain:kineto.json": "explain --trace {}",
    "calibrate:all_reduce.txt": "calibrate {job} --from-nccl-tests {}",
    "calibrate:kineto.json": "calibrate {job} --from-kineto {}",
    "calibrate:pairs.csv": "calibrate {job} --pairs {}",
    "calibrate:profile.json": "calibrate {job} --pairs {seeds}/pairs.csv --onto {}",
    "import:megatron.sh": "import {}",
    "import:primus.yaml": "import {}",
}


def _commands() -> Iterator[Format]:
    """Each file by way of a command that reads it; flags themselves; all in this process."""
    known = {f.name: f for f in (*_of_jobs(), *_of_costs(), *_of_runs(), *_launches())}
    for name, words in COMMANDS.items():
        own = known[name.partition(":")[2]]
        yield Format(name, own.seed, lambda p, words=words: _commanded(words, p), share=0.02)
    yield _seed("flags.txt", _flagged, share=0.05, said=ALL[1:])


def _commanded(words: str, path: Path) -> object:
    names = {"job": JOB, "seeds": SEEDS}
    return answer([w.format(path, **names) for w in words.split()])


def _words(path: Path) -> str:
    """As Python has what stands on a command line."""
    return read_bytes(path, FILES).decode("utf-8", "surrogateescape")


def _flagged(path: Path) -> object:
    """One line of the file as a command; which, by its content."""
    text = _words(path)
    lines = text.splitlines() or [""]
    try:
        words = shlex.split(lines[zlib.crc32(text.encode(errors="surrogateescape")) % len(lines)])
    except ValueError:
        words = text.split()
    return answer([str(SEEDS / w) if (SEEDS / w[:99]).is_file() else w for w in words[:200] if "\0" not in w])


def answer(args: list[str]) -> object:
    """What a command prints, held against the contract; its error as the PiperError that it was."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*args, "--json"])
    assert "Traceback" not in err.getvalue(), err.getvalue()
    if code == 2 and not args:
        return None
    found = json.loads(out.getvalue(), parse_constant=_no_constant)
    assert found["schema_version"] == 1 and out.getvalue().count("\n") == 1
    if "error" not in found:
        assert code in (0, 3, 5), code
        return found
    e = found["error"]
    assert set(e) == {"kind", "file", "key", "message", "allowed", "suggestion"} and "made a mistake" not in str(e), e
    assert code == ErrorKind(e["kind"]).exit_code
    raise PiperError(ErrorKind(e.pop("kind")), e.pop("message"), **e)


def _no_constant(word: str) -> NoReturn:
    raise AssertionError(f"{word} is not JSON")

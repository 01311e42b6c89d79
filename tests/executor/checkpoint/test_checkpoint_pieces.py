"""Pieces of parameters: each element is written once, and found under any other cut; files as others read them."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.checkpoint import keeper as keeper_module
from executor.checkpoint import tensors as tensors_module
from executor.checkpoint.manifest import read_manifest
from executor.checkpoint.pieces import ShardPiece, written
from executor.checkpoint.reader import CheckpointReader, digests
from executor.checkpoint.settings import check_same, training_of
from executor.checkpoint.tensors import MANIFEST, CheckpointTensors, digest_of, write_tensors
from executor.parallel.shares import ParamShard, ShardCut
from ir.core.errors import PiperError
from ir.job.run_options import CheckpointOptions
from ir.plan.places import RankPlacement
from tests.executor.checkpoint.checkpoints import Alone, State, drawn, elements, part

MOE = ("model.config=tiny-moe", "schedule.microbatches=4")


# -- two cuts of one parameter ----------------------------------------------------------------------------------------


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...], blocks: dict[int, tuple[int, ...]]) -> ShardPiece:
    cuts = []
    for dim, sizes in blocks.items():
        count = draw(st.sampled_from([1, 2, 4]))
        if count > 1:
            cuts.append(ShardCut(dim, draw(st.integers(0, count - 1)), count, sizes))
    share = ParamShard(shape, tuple(draw(st.permutations(cuts))))
    first = draw(st.integers(0, prod(share.local)))
    return ShardPiece(share, first, draw(st.integers(0, prod(share.local) - first)))


@st.composite
def two(draw: st.DrawFn) -> tuple[ShardPiece, ShardPiece]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3)))
    dims = draw(st.sets(st.sampled_from([d for d, n in enumerate(shape) if n % 4 == 0] or [0])))
    blocks = {d: draw(st.sampled_from([(n,), (n - 4, 4)] if n > 4 else [(n,)])) for d in dims for n in [shape[d]]}
    blocks = {d: sizes for d, sizes in blocks.items() if shape[d] % 4 == 0}
    return draw(pieces(shape, blocks)), draw(pieces(shape, blocks))


@given(two())
def test_what_two_pieces_share_is_what_indexing_says(pair: tuple[ShardPiece, ShardPiece]) -> None:
    a, b = pair
    whole = torch.arange(prod(a.share.shape)).view(a.share.shape)
    here, there = (part(whole, p.share, p.first, p.count) for p in (a, b))
    starts, lengths = a.runs()
    runs = [whole.view(-1)[i : i + n] for i, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    assert torch.equal(torch.cat([*runs, whole.view(-1)[:0]]), here)
    found = torch.full_like(here, -1)
    for at, start, count in a.shared(b):
        assert count > 0 and bool((found[at : at + count] == -1).all())
        found[at : at + count] = there[start : start + count]
    assert torch.equal(found, torch.where(torch.isin(here, there), here, -1))


# -- plans ------------------------------------------------------------------------------------------------------------

PLANS = [
    ("parallel.pp=1", "parallel.dp=4", "parallel.zero=3"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.zero=2"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.zero=0", "schedule.name=dualpipe"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.zero=1", "schedule.name=dualpipe"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.zero=2", "schedule.name=dualpipe", "parallel.bucket_MiB=0.05"),
    ("parallel.pp=2", "model.tie_word_embeddings=true", "parallel.dp=3", "parallel.zero=1"),
    ("parallel.pp=2", "parallel.tp=2", "parallel.dp=2", "parallel.zero=1"),
    ("parallel.pp=1", "parallel.tp=4", "parallel.dp=2", "parallel.zero=3"),
    ("parallel.pp=1", "parallel.tp=2", "parallel.cp=2", "parallel.dp=2", "parallel.zero=2"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.zero=1", "optimizer.offload=0.37"),
    ("parallel.pp=2", "parallel.tp=2", "optimizer.offload=0.8"),
    ("parallel.pp=1", "parallel.dp=2", "parallel.zero=3", "optimizer.offload=1"),
]
EXPERTS = [
    ("parallel.pp=1", "parallel.dp=4", "parallel.ep=2", "parallel.zero=2"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.ep=2", "parallel.zero=1", "schedule.name=dualpipe"),
    ("parallel.pp=1", "parallel.tp=2", "parallel.dp=4", "parallel.ep=4", "parallel.etp=2", "parallel.zero=1"),
    ("parallel.pp=1", "parallel.tp=2", "parallel.dp=2", "parallel.ep=4", "parallel.zero=3"),
]


def name_of(sets: tuple[str, ...]) -> str:
    return " ".join(s.split(".")[1].replace("=", "") for s in sets)


@pytest.mark.parametrize("sets", [*PLANS, *((*MOE, *s) for s in EXPERTS)], ids=name_of)
def test_every_element_is_written_by_one_rank(sets: tuple[str, ...], tmp_path: Path) -> None:
    state = State.of(tmp_path, *sets)
    found: dict[str, list[ShardPiece]] = {}
    for rank, sync in enumerate(state.syncs):
        mine = written(state.plan.graph, RankPlacement.of(state.plan), rank)
        for name, first, slots in sync.kept():
            if name in mine:
                found.setdefault(name, []).append(ShardPiece(state.held[rank][name], first, len(slots["weight"])))
    assert found.keys() == {p.name for e in state.prepared.base.entries for p in e.part.params}
    assert all(bool((elements(p) == 1).all()) for p in found.values())


@pytest.mark.parametrize("family", [PLANS, [(*MOE, *s) for s in EXPERTS]], ids=["dense", "experts"])
def test_any_plan_finds_what_any_other_has_saved(family: list[tuple[str, ...]], tmp_path: Path) -> None:
    tied = [s for s in family if "model.tie_word_embeddings=true" not in s]
    states = [State.of(tmp_path / "job", *sets) for sets in tied]
    values = drawn(states[0], ("weight", "exp_avg", "exp_avg_sq"), torch.float64)
    for i, state in enumerate(states):
        state.fill(values)
        checkpoint = state.save(tmp_path / f"plan-{i}", 7)
        reader = CheckpointReader(checkpoint, read_manifest(checkpoint))
        assert all(torch.equal(reader.whole(s, n), v) for s, named in values.items() for n, v in named.items())
        other = states[(i + 1) % len(states)]
        other.forget()
        with pytest.raises(AssertionError):
            other.check(values)
        other.load(checkpoint)
        assert other.check(values) > 0 and {s.optimizer.own.steps for s in other.syncs} == {7}


def test_a_loop_that_saves_twice_behind_one_step_has_one_checkpoint(tmp_path: Path) -> None:
    state, transport = State.of(tmp_path / "job", "parallel.pp=1", "parallel.dp=2", "parallel.zero=1"), Alone()
    keepers = state.keepers(CheckpointOptions(save=str(tmp_path / "folder")))
    for keeper in keepers:
        keeper.begin(transport)  # type: ignore[arg-type]
    for keeper in reversed(keepers):  # rank 1 asks again before rank 0 has given the first its name
        for _ in range(2):
            keeper.after(3, 3, transport)  # type: ignore[arg-type]
    keepers[0].close(transport)  # type: ignore[arg-type]
    (found,) = (tmp_path / "folder").glob("step-*")
    state.load(found)


def test_two_writers_of_one_element_or_none_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State.of(tmp_path / "job", "parallel.pp=1", "parallel.dp=2", "parallel.zero=0")
    everything = frozenset(n for n in state.held[0])
    for i, wrong in enumerate((everything, frozenset[str]())):
        monkeypatch.setattr(keeper_module, "written", lambda graph, places, rank, wrong=wrong: wrong)
        with pytest.raises(AssertionError, match="elements of"):
            state.save(tmp_path / f"folder-{i}", 1)


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_parameters_may_be_narrower_than_what_is_updated(first: str, second: str, tmp_path: Path) -> None:
    def state(params: str) -> State:
        formats = f"precision.params={params}", "precision.compute=fp32", "precision.optimizer=fp32"
        return State.of(tmp_path / "job", "parallel.pp=1", "parallel.dp=2", "parallel.zero=2", *formats)

    one, other = state(first), state(second)
    values = drawn(one, ("weight", "exp_avg", "exp_avg_sq"), torch.float32)
    one.fill(values)
    other.load(one.save(tmp_path / "folder", 3))
    assert other.check(values) > 0  # masters to the bit, parameters what they round to


@pytest.mark.parametrize(("zero", "slot"), [(1, "weight"), (2, "exp_avg")])
def test_a_piece_that_files_have_not_all_of_or_twice_is_refused_by_name(zero: int, slot: str, tmp_path: Path) -> None:
    state = State.of(tmp_path / "job", "parallel.pp=1", "parallel.dp=2", f"parallel.zero={zero}")
    checkpoint = state.save(tmp_path / "saved", 1)
    manifest = read_manifest(checkpoint)
    name, pieces = next((n, p) for n, p in manifest.parameters.items() if len(p) == 2)
    reader, size = CheckpointReader(checkpoint, manifest), prod(manifest.training.shapes[name])
    assert reader.whole(slot, name).numel() == size
    for wrong in ((), pieces[:1], pieces[1:], (*pieces, pieces[0]), (pieces[0], pieces[0], pieces[0])):
        found = sum(p.piece.count for p in wrong)
        reader.manifest = replace(manifest, parameters=manifest.parameters | {name: wrong})
        with pytest.raises(PiperError, match=f"{found} elements of {slot}/{name} where {size} are needed"):
            reader.whole(slot, name)


def test_what_a_rank_writes_is_cut_into_files_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ("parallel.pp=1", "parallel.tp=2", "parallel.zero=3"), ("parallel.pp=2", "parallel.zero=0")
    state = State.of(tmp_path / "job", *one, "parallel.dp=2")
    values = drawn(state, ("weight", "exp_avg", "exp_avg_sq"), torch.float64)
    state.fill(values)
    few = read_manifest(state.save(tmp_path / "few", 1))
    monkeypatch.setattr(keeper_module, "FILE_BYTES", 30_000)
    checkpoint = state.save(tmp_path / "many", 1)
    many = read_manifest(checkpoint)
    assert len(few.files) == 4 and len(many.files) > 20
    sizes = {f: sum(p.piece.count for n in many.parameters.values() for p in n if p.file == f) for f in many.files}
    assert all(0 < 3 * 8 * size <= 30_000 for size in sizes.values())
    assert max(len(p) for p in many.parameters.values()) > max(len(p) for p in few.parameters.values())
    assert digests(checkpoint, many) == digests(tmp_path / "few" / "step-000001", few)
    taker = State.of(tmp_path / "job", *other, "parallel.dp=2")
    taker.load(checkpoint)
    assert taker.check(values) > 0


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_what_the_library_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        "weight/a": torch.rand(3, 5, dtype=torch.float64),
        "weight/b": torch.rand(7).bfloat16(),
        "a/ö": torch.arange(6.0).view(3, 2).t(),
        "empty": torch.zeros(0, 4),
        "random/cpu": torch.arange(16, dtype=torch.uint8),
    }
    ticks: list[int] = []
    monkeypatch.setattr(tensors_module, "STRETCH", 100)
    wrote = write_tensors(tmp_path / "x.safetensors", tensors, lambda: ticks.append(1))
    assert wrote == digest_of(tmp_path / "x.safetensors") and wrote.bytes == (tmp_path / "x.safetensors").stat().st_size
    found, ours = safetensors.torch.load_file(tmp_path / "x.safetensors"), CheckpointTensors(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys() == set(ours.names) and len(ticks) == -(-wrote.bytes // 100)
    assert all(torch.equal(found[n], t) and torch.equal(ours.flat(n), t.reshape(-1)) for n, t in tensors.items())
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    safetensors.torch.save_file({"y": torch.arange(5.0)}, tmp_path / "y.safetensors")
    assert torch.equal(CheckpointTensors(tmp_path / "y.safetensors").flat("y"), torch.arange(5.0))


def _tensor_file(header: str, size: int) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + bytes(size)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 64,
        b"\x02" + b"\0" * 7 + b"{}",
        b"\x08" + b"\0" * 7 + b'{"x":{}}',
        b"no header",
        _tensor_file('{"x":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}', 8),
        _tensor_file('{"x":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', 8),
        _tensor_file('{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 4),
        _tensor_file('{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', 8),
        _tensor_file("[" * 5000, 8),
    ],
)
def test_what_is_no_tensor_file_is_refused_by_name(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(PiperError, match="cannot read tensors") as info:
        CheckpointTensors(tmp_path / "x").flat("x")
    assert info.value.file == str(tmp_path / "x") and info.value.kind.exit_code == 2


@pytest.mark.parametrize("config", ["tiny-llama", "tiny-moe"])
def test_a_manifest_says_what_was_trained_and_comes_back_as_it_was(config: str, tmp_path: Path) -> None:
    state = State.of(tmp_path / "job", f"model.config={config}", "parallel.dp=2", "optimizer.name=sgd")
    checkpoint = state.save(tmp_path / "saved", 3)
    manifest = read_manifest(checkpoint)
    assert manifest.text() == (checkpoint / MANIFEST).read_bytes()
    assert manifest.training == training_of(state.prepared) and manifest.training.slots == ("weight",)
    assert manifest.model_digest == manifest.training.digest and manifest.ranks == 4
    assert manifest.tokens == 3 * 8 * 8 and manifest.job["parallel"]["dp"] == 2
    check_same(manifest, state.prepared, checkpoint)


# What a checkpoint of the first version says of a model. A word more, of a model that is as it was, would refuse them.
SAID = """
    act activation attn_dropout embed_dropout encoder ffn form head_dim heads hidden hidden_dropout kv_heads layers
    mixer mla mlp_bias model_type moe mtp norm norm_bias norm_eps out_bias positions qk_norm qkv_bias rope rope_pairs
    rope_scaling rope_share rope_theta score_by_layer score_scale stored tied vocab window windows"""


def test_a_manifest_says_no_more_of_a_model_than_the_first_ones_did(tmp_path: Path) -> None:
    assert sorted(training_of(State.of(tmp_path / "job").prepared).model) == SAID.split()


def test_as_many_other_tokens_are_other_data(tmp_path: Path) -> None:
    texts = {}
    for folder in ("a", "b"):
        texts[folder] = tmp_path / folder / "text.txt"
        texts[folder].parent.mkdir()
        texts[folder].write_text("to be or not to be")
    one, two = (State.of(tmp_path / folder, "data.source=text.txt") for folder in texts)
    checkpoint = one.save(tmp_path / "saved", 1)
    manifest = read_manifest(checkpoint)
    check_same(manifest, two.prepared, checkpoint)
    texts["b"].write_text("to be or nor to be")
    with pytest.raises(PiperError, match="other tokens here than there"):
        check_same(manifest, two.prepared, checkpoint)

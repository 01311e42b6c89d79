"""docs/YOUR_MODEL.md as its reader follows it; and what cannot be exported is refused with the user's line."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from executor.frontend.capture import capture
from executor.modules.user.exported import export_cut
from executor.modules.user.model import UserModel
from executor.modules.user.rewrites.seams import pack, unpack
from executor.parallel.inline import RankAxis, RankRegion
from ir.core.errors import PiperError
from ir.core.work import DType
from piper_sim.app.cli import main
from tests.docs.test_docs import ROOT, blocks, commands


@pytest.mark.parametrize("page", ["README.md", pytest.param("docs/YOUR_MODEL.md", marks=pytest.mark.slow)])
def test_the_page_leads_from_a_file_to_a_prediction_and_a_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found, text = dict[str, str](), (ROOT / page).read_text(encoding="utf-8")
    begin = text[: text.index("# Your own model")].count("\n")
    for line, language, block in blocks(ROOT / page):
        if line > begin:
            found.setdefault(language, block)
    assert sum(len(found[k].splitlines()) for k in ("python", "toml", "sh")) <= 12
    (tmp_path / "model.py").write_text(found["python"])
    (tmp_path / "job.toml").write_text(found["toml"])
    monkeypatch.chdir(tmp_path)
    printed: list[dict[str, Any]] = []
    for words in commands(found["sh"]):
        assert main([*words, "--json"]) == 0
        printed.append(json.loads(capfd.readouterr().out))
    predicted, ran = printed
    assert predicted["plan_digest"] == ran["plan_digest"] and predicted["fits"]
    assert len(ran["losses"]) == 3 and 5 < ran["losses"][2] < ran["losses"][0] < 6


class Net(nn.Module):
    """Two layers, and a twist."""

    def __init__(self, twist: str = "") -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.twist, self.idle = twist, nn.ModuleList([nn.Identity()])
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor) -> Any:
        """As the twist says."""
        x = first = self.embed(ids)
        if self.twist == "places":
            x += 1
        for layer in self.layers:
            x = layer(x)
            if self.twist == "values" and x.sum() > 0:
                x = -x
            if self.twist == "shapes":
                x = x[ids > 3].sum() + x
            if self.twist == "buffers":
                self.seen += 1
            if self.twist == "seams":
                first.mul_(2)
            if self.twist == "draws":
                x = x + torch.rand_like(x)
            if self.twist == "two":
                x = x + first
        return x.sum() if self.twist == "scalar" else ((x, None), {"more": ids})


TWISTS = {
    "values": 'if self.twist == "values" and x.sum() > 0',
    "buffers": "writes seen in forward",
    "seams": "writes in place what another layer makes or reads",
    "scalar": "returns no tensor of sequences, tokens and features",
    "draws": "draws random numbers",
}


@pytest.mark.parametrize("twist", TWISTS)
def test_what_no_plan_could_repeat_is_refused_with_the_line(twist: str) -> None:
    with pytest.raises(PiperError) as info:
        UserModel(lambda: Net(twist), tags={"PP": "layers.*"}, batch=(2, 3)).refuse_impure(2, 3)
    assert TWISTS[twist] in info.value.message
    assert twist != "values" or str(Path(__file__)) in info.value.message


@pytest.mark.parametrize(
    ("tags", "said", "fix"),
    [
        ({"PP": "layer.*"}, "no module is called 'layer.*'", "layers.*"),
        ({"PP": "idle.*"}, "that forward never calls", None),
        ({"PP": "idle"}, "that forward never calls", None),
        ({"PP": "layers"}, "that forward never calls", "layers.*"),
        ({"PP": "layers.*", "EP": "layer.*"}, "no module is called 'layer.*'", "layers.*"),
        ({"DP": "layers.*"}, "DP says nothing of a module", "leave it out"),
    ],
)
def test_tags_that_say_nothing_are_refused(tags: dict[str, str], said: str, fix: str | None) -> None:
    with pytest.raises(PiperError, match=r"model\.tags") as info:
        export_cut(Net(), tags, 2, 3)
    assert said in info.value.message and info.value.suggestion == fix


@dataclass
class Told:
    """That torch.export does not know."""

    logits: Tensor


class More(Net):
    """It asks for something, or answers otherwise."""

    def forward(self, ids: Tensor, at: Tensor | None) -> Any:
        """at: to be given."""
        return super().forward(ids)


class Answering(Net):
    """A dataclass."""

    def forward(self, ids: Tensor) -> Any:
        """Its logits."""
        return Told(super().forward(ids)[0][0])


@pytest.mark.parametrize(
    ("made", "said", "fix"),
    [
        (More, "the forward of More needs at beside the token ids", "at = None"),
        (Answering, "cannot be exported", "register_dataclass"),
    ],
)
def test_what_is_refused_for_its_inputs_and_outputs_is_not_told_to_branch(made: Any, said: str, fix: str) -> None:
    with pytest.raises(PiperError, match=said) as info:
        export_cut(made(), {"PP": "layers.*"}, 2, 3)
    assert fix in (info.value.suggestion or "")


class Calling(Net):
    """Something between its layers, by name."""

    def __init__(self, what: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.what = what

    def forward(self, ids: Tensor) -> Any:
        """Of its last layer."""
        x = self.embed(ids)
        for layer in self.layers:
            x = self.what(layer(x), layer.weight)
        return x


class Turned(nn.Module):
    """Real logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor) -> Tensor:
        """Of complex ones."""
        found: Tensor = self.net(ids).real
        return found


class Turning(nn.Linear):
    """Complex numbers in and out."""

    def forward(self, x: Tensor) -> Tensor:
        """x (…, features)."""
        y = super().forward(x.real if x.is_complex() else x)
        return torch.complex(y, y)


def test_complex_numbers_at_seams_are_named() -> None:
    net = Calling(lambda x, w: x)
    net.layers = nn.ModuleList(Turning(4, 4) for _ in range(2))
    with pytest.raises(PiperError, match=r"crosses seams is of .* complex") as info:
        export_cut(Turned(net), {"PP": "net.layers.*"}, 2, 3)
    assert "view_as_real" in (info.value.suggestion or "")


NUMBERS = torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool


@given(
    kind=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
    others=st.lists(st.tuples(st.sampled_from((None, *NUMBERS)), st.integers(1, 7), st.integers(1, 3)), max_size=4),
    at=st.integers(0, 4),
)
def test_numbers_cross_seams_to_the_bit_and_gradients_go_past_them(
    kind: torch.dtype, others: list[tuple[torch.dtype | None, int, int]], at: int
) -> None:
    """Any bits, among them those of signalling NaNs; and of what has gradients each element has its own."""
    made = torch.Generator().manual_seed(at)

    def value(of: torch.dtype, *shape: int) -> Tensor:
        if of.is_floating_point:
            return torch.randn(shape, generator=made, dtype=torch.float64).to(of).requires_grad_()
        if of is torch.bool:
            return torch.rand(shape, generator=made) < 0.5
        return torch.randint(torch.iinfo(of).min, torch.iinfo(of).max, shape, generator=made, dtype=of)

    values = [value(of or kind, *shape) for of, *shape in others]
    values.insert(at, value(kind, 2, 3))
    shapes = tuple((tuple(v.shape), v.dtype) for v in values)
    packed = pack(values, kind, (2, 3), 64)
    found = unpack(packed, shapes)
    assert packed.dtype is kind and packed.shape == (2, 3, 64)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(found, values, strict=True))
    weights = [torch.arange(1, v.numel() + 1).view(v.shape).to(v.dtype) for v in values]
    sum(((f * w).sum() for f, w in zip(found, weights, strict=True) if f.requires_grad), torch.zeros(())).backward()
    assert all(
        v.grad is not None and torch.equal(v.grad, w) for v, w in zip(values, weights, strict=True) if v.requires_grad
    )


@pytest.mark.filterwarnings("ignore")  # torch warns of its own exporting
@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda x, w: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "torch.cond"),
        (lambda x, w: x + torch.vmap(lambda row: x @ row)(w).movedim(0, -1), "torch.vmap"),
    ],
)
def test_what_no_pass_sees_into_is_named(what: Callable[[Tensor, Tensor], Tensor], said: str) -> None:
    with pytest.raises(PiperError, match=f"^model.module: forward calls {said}") as info:
        export_cut(Calling(what), {"PP": "layers.*"}, 2, 3)
    assert info.value.key == "model.module" and info.value.kind.exit_code == 2


class Padded(nn.Module):
    """More rows than words, as where tokens are added, or a table is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(12, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of nine."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embed.weight[:9].T


class Kinds(Padded):
    """A table of two kinds of tokens ahead of that of words, and one of places, which is longer."""

    def __init__(self) -> None:
        super().__init__()
        words, self.embed = self.embed, nn.Embedding(2, 4)
        self.places, self.words, self.head = nn.Embedding(20, 4), words, nn.Linear(4, 16)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of more than there are words."""
        x = self.embed((ids > 3).long()) + self.places(torch.arange(ids.shape[1]))
        x = x + self.words(torch.cat((ids[:, :1], ids[:, 1:]), 1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_words_are_those_of_the_table_that_ids_are_looked_up_in() -> None:
    given: dict[str, Any] = {"batch": (1, 3), "dtype": DType.FP32, "tags": {"PP": "layers.*"}}
    assert capture(Kinds(), **given)["vocab"] == 12
    assert capture(Kinds(), **given, tp=2, tp_plan={"words": "embedding_rowwise"})["vocab"] == 12


def test_a_run_draws_and_takes_tokens_that_there_are_logits_of() -> None:
    given: dict[str, Any] = {"batch": (1, 3), "dtype": DType.FP32, "tags": {"PP": "layers.*"}}
    assert capture(Padded(), **given)["vocab"] == 9
    assert capture(Net(), **given)["vocab"] == 4  # of nine rows: what a layer gives is taken for logits


def test_what_is_refused_whole_is_not_said_to_be_so_for_fewer_tokens() -> None:
    with pytest.raises(PiperError, match="Net cannot be exported") as info:
        export_cut(Net("values"), {"PP": "layers.*"}, 2, 4, RankRegion(cp=RankAxis(2, 0)))
    assert info.value.key == "model.module" and info.value.message.startswith("Net ")


@pytest.mark.parametrize("twist", ["", "places", "two"])
def test_chunks_are_the_module_bit_for_bit(twist: str) -> None:
    net = Net(twist)
    cut = export_cut(net, {"PP": "layers.*"}, 2, 3)
    x = ids = torch.arange(6).view(2, 3)
    for chunk in cut.chunks.values():
        x = chunk(x)
    assert torch.equal(x, net(ids)[0][0]) and not cut.wants_ids
    assert {id(p) for c in cut.chunks.values() for p in c.parameters()} == {id(p) for p in net.parameters()}


class Filled(nn.Linear):
    """A result that is filled by zeros first, then by what is computed."""

    def forward(self, x: Tensor) -> Tensor:
        """x (sequences, tokens, features)."""
        made = torch.ones(x.shape)
        made[..., :2] = torch.zeros(*x.shape[:2], 2)
        made[..., 1:] = super().forward(x)[..., 1:]
        return made


class Written(nn.Module):
    """Angles, made of sizes, of which some are written over and all are read in each layer (as transformers' Qwen3.5
    has them).
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 4), nn.ModuleList(Filled(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """ids (sequences, tokens)."""
        x, angles = self.embed(ids), torch.arange(1.0, 9.0).view(2, 1, 4)
        first = angles[0]
        first[..., 0::2] = angles[1, ..., 0::2]
        for layer in self.layers:
            x = x + layer(x + first.cos())
        return x


def test_what_is_written_to_values_made_of_sizes_is_there_for_whoever_reads_them() -> None:
    model = UserModel(Written, dtype=None, tags={"PP": "layers.*"}, batch=(2, 3))
    x = ids = torch.arange(6).view(2, 3)
    for chunk in export_cut(model.module, {"PP": "layers.*"}, 2, 3).chunks.values():
        x = chunk(x)
    assert torch.equal(x, Written.forward(model.module, ids))  # type: ignore[arg-type]
    model.refuse_training()
    model.refuse_unlike(9, 1)


class Placed(nn.Module):
    """A table that forward puts on the device of what it reads; how: what else it does there."""

    def __init__(self, how: Callable[[Tensor], Tensor], registered: bool = True) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.how, table = how, torch.linspace(0.5, 1.0, 4).view(1, 1, 4)
        if registered:
            self.register_buffer("table", table)
        else:  # as Llama's own code has its frequencies
            self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x: Tensor = self.embed(ids)
        self.table = self.how(self.table.to(ids.device))
        for layer in self.layers:
            x = layer(x) * self.table
        return x


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.filterwarnings("error:Accessing the data pointer")
def test_a_buffer_may_be_put_where_it_is(registered: bool) -> None:
    plain, ids = Placed(lambda t: t, registered), torch.arange(6).view(2, 3)
    model = UserModel(partial(Placed, lambda t: t, registered), tags={"PP": "layers.*"}, batch=(2, 3))
    model.refuse_impure(2, 3)
    model.refuse_unlike(9, 1)
    capture(plain, dtype=DType.FP32, tags={"PP": "layers.*"}, batch=(2, 3))
    x = ids
    for chunk in export_cut(plain, {"PP": "layers.*"}, 2, 3).chunks.values():
        x = chunk(x)
    assert torch.equal(x, plain(ids))
    for how in (lambda t: t * 0.9, lambda t: t.flip(2)):
        with pytest.raises(PiperError, match="forward writes table"):
            export_cut(Placed(how, registered), {"PP": "layers.*"}, 2, 3)


def test_a_star_is_each_module_and_not_the_whole() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))

    assert UserModel(build, tags={"PP": "*"}, batch=(2, 3)).chunks == ("l0", "l1", "l2")


class Words(nn.Module):
    """A word of Python's for a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Embedding(9, 4), "one": nn.Linear(4, 4), "two": nn.Linear(4, 9)})

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        for part in self.parts.values():
            x = part(x)
        return x


def test_a_name_that_no_graph_can_be_written_down_with_is_said_to_be_one() -> None:
    tags = {"PP": "parts.[ot]*"}
    assert UserModel(lambda: Words("inner"), tags=tags, batch=(2, 3)).chunks == ("embed", "l0", "l1")
    with pytest.raises(PiperError, match=r"another name than parts\.in, which is a word of Python's"):
        UserModel(lambda: Words("in"), tags=tags, batch=(2, 3))

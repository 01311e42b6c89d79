"""A user's own model: `[model] module = "my_model.py:build"`, cut at its annotations."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from executor.device.valueless import ValuelessModel
from executor.modules.base import TRACING, BuiltChunks, TokenLoss
from executor.modules.hub_weights import HubCheckpoint
from executor.modules.remade import outputs
from executor.modules.user.annotate import cut
from executor.modules.user.divided.linears import ModelShard, divide
from executor.modules.user.exported import copy_of, export_cut, logits_of, shapes_of
from executor.modules.user.exports.torch_export import options
from executor.modules.user.given import UserModelWeights, saved_buffers
from executor.modules.user.purity import (
    ChunkCall,
    host_seeded,
    refuse_impure,
    refuse_memory,
    refuse_unlike,
    unreached,
    without_values,
)
from executor.modules.user.reference import made_by, valueless
from executor.modules.user.rewrites.own_functions import is_own
from executor.modules.user.routed import (
    SENT,
    ExpertChunk,
    UserExpertAdd,
    UserExpertRouter,
    UserExperts,
    UserExpertsOfOneRank,
    cut_at_experts,
    mark_experts,
    refuse_unlike_experts,
)
from executor.modules.user.trainable import (
    refuse_hook,
    refuse_training,
    refuse_unread,
    refuse_untrained,
    unrepeatable,
)
from executor.parallel.expert_all_to_all import ExpertAllToAll, ExpertGroup, exchanges
from executor.parallel.inline import RankAxis, RankRegion
from executor.parallel.shares import ParamShard, ShardCut
from ir.graph import expert_rows

MOST_PRODUCTS = 4 * 10**9  # of a forward that is tried with values: a second or so, on a core that others use
MOST_FOR_EXPERTS = 2 * 10**8  # of a layer's: transformers may copy as many weights to multiply by them


class UserModel:
    """A module with its own initialisation, made under one seed, so every rank makes the same. It is annotated, or
    tags say by module path where its layers are; then it is exported for microbatches of `batch`, sequences and tokens.
    shard: what this rank has of it. values: the files that have its parameters' values; none are drawn, and a rank
    reads those of its own chunks when it keeps them. shapes, frozen: of its parameters that are trained, and of those
    that are read and not trained. drawn: checksums of what build() made of what is read, where somebody has noted them.

    >>> from executor.modules.user.annotate import annotate
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.layer = nn.Embedding(4, 2), nn.Linear(2, 4)
    ...     def forward(self, ids):
    ...         x = self.embed(ids)
    ...         with annotate("PP"):
    ...             return self.layer(x)
    >>> UserModel(Net).chunks
    ('embed', 'l0')
    """

    def __init__(
        self,
        build: object,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = torch.float32,
        parts: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        batch: tuple[int, int] = (1, 1),
        shard: ModelShard | None = None,
        values: HubCheckpoint | None = None,
    ) -> None:
        module, blank = (made_by(build, seed), ValuelessModel()) if values is None else valueless(build, seed, values)
        making: Callable[[], AbstractContextManager[Any]] = nullcontext if values is None else blank.building
        with making():
            self.module = module if dtype is None else _cast(module, dtype)
        params = dict(self.module.named_parameters())
        self.shapes = {n: tuple(p.shape) for n, p in params.items() if p.requires_grad}
        frozen = {n: tuple(p.shape) for n, p in params.items() if not p.requires_grad}
        rows = {id(m.weight) for m in self.module.modules() if isinstance(m, nn.Embedding)}
        self.tables = tuple(n for n, p in params.items() if id(p) in rows)
        self._hooked = tuple(n for n, p in self.module.named_parameters() if p._backward_hooks)
        self.live = not tags  # its code runs as it stands, and may make tensors without saying where
        shard = shard or ModelShard()
        divided = shard.region.tp.size > 1
        if not tags:
            shard.refuse_annotated()
        with making():
            experts = mark_experts(self.module, (tags or {}).get("EP", ""), shard.ep, shard.index)
        with TRACING, host_seeded(seed):
            whole = shapes_of(self.module, *batch) if divided else None
        with making():
            self.dims = divide(self.module, shard.plan, shard.region) if divided else {}
        blank.refuse_made(self.module)
        self._stacked = {id(p): shard for part in experts for p in part.parameters()}
        every = {id(p): n for n, p in self.module.named_parameters()}
        self._names = {i: n for i, n in every.items() if n in self.shapes}
        held = {k: self.dims[n] for k, n in every.items() if n in self.dims}
        self._fresh = copy_of(self.module) if tags else self.module  # as it is before any call
        with TRACING, host_seeded(seed):
            given = (*batch, shard.region, held, seed, whole)
            self._cut = export_cut(self.module, tags, *given) if tags else cut(self.module)
        self.partly = tuple(n for k, n in self._names.items() if k in self._cut.partly)
        self._batch, self.drawn = batch, dict[str, int]()
        self._ep, self._region = shard.ep, shard.region
        chunks, read = self._cut.chunks.items(), self.reads_tokens
        found = {c: cut_at_experts(c, chunk, shard.region, ids=c in read) for c, chunk in chunks}
        self.routed = {c: x for c, x in found.items() if x is not None}
        self._experts = {c: experts[x.number] for c, x in self.routed.items()}
        last = {c: "add" if c in self.routed else (parts or {}).get(c, "") for c in self._cut.chunks}
        self._units = {c: f"{c}.{part}" if part else c for c, part in last.items()}
        used = {id(p) for c in self._cut.chunks for m in self._modules(c) for p in m.parameters()}
        refuse_unread([n for i, n in self._names.items() if i not in used | self._cut.unread])
        left = {n: self.shapes.pop(n) for i, n in self._names.items() if i not in used}  # as torch leaves it
        self._names = {i: n for i, n in self._names.items() if i in used}
        refuse_untrained(self.shapes)
        self._frozen = {i: n for i, n in every.items() if n in frozen and i in used}
        self.frozen = {n: frozen[n] for n in self._frozen.values()}
        self._given = None if values is None else self._weights(values, frozen, left)

    @cached_property
    def idle(self) -> tuple[str, ...]:
        """Parameters that no gradient of the logits reaches."""

        def forward() -> tuple[Tensor, ...]:
            return self._try(*self._batch, lambda _, chunk, x: outputs(chunk(*x)))

        found = self._cut.idle
        if self.live:  # an exported graph says it itself
            with TRACING:
                found = unreached(forward, self.module)
        return tuple(n for k, n in self._names.items() if k in found)

    def _modules(self, chunk: str) -> tuple[nn.Module, ...]:
        return (self._cut.chunks[chunk], *([self._experts[chunk]] if chunk in self.routed else []))

    @property
    def chunks(self) -> tuple[str, ...]:
        return tuple(self._cut.chunks)

    @property
    def divides(self) -> int:
        """Among how many ranks the tokens of a sequence are shared out."""
        return self._region.divides

    @property
    def words(self) -> RankAxis:
        """To the ranks that have the logits of other words; where all have all of them, to none."""
        return self._region.tp if self._cut.some_words else RankAxis()

    @property
    def vocabulary(self) -> int | None:
        """Of how many words there are logits, where its graph says it."""
        return self._cut.vocabulary

    @property
    def rows(self) -> tuple[int, ...]:
        """Of each table that token ids are looked up in, as far as its graph says it."""
        named, params = self._names | self._frozen, dict(self.module.named_parameters(remove_duplicate=False))
        found = {named[id(params[n])] for n in self._cut.tables if n in params}
        return tuple((self.shapes.get(n) or self.frozen[n])[0] for n in sorted(found))

    @property
    def reads_tokens(self) -> frozenset[str]:
        """Chunks behind the first that read the token ids themselves, not their shape alone."""
        return self._cut.wants_ids - self._cut.shape_only

    def build(self, chunks: Sequence[str]) -> BuiltChunks:
        """The chunks asked for; the last one of the model ends in the loss."""
        units: dict[str, nn.Module] = {}
        extras: dict[str, tuple[str, ...]] = {}
        reads: dict[str, tuple[str, ...]] = {}
        params: dict[str, nn.Parameter] = {}
        frozen: dict[str, nn.Parameter] = {}
        ports: dict[str, Mapping[str, tuple[int, ...]]] = {}
        between: dict[str, ExpertAllToAll] = {}
        for name in chunks:
            unit, key, at = self._cut.chunks[name], self._units[name], self.chunks.index(name)
            read = [p for m in self._modules(name) for p in m.parameters()]
            params.update((self._names[id(p)], p) for p in read if id(p) in self._names)
            frozen.update((self._frozen[id(p)], p) for p in read if id(p) in self._frozen)
            before = self._units[self.chunks[at - 1]] if at else ""
            ids: tuple[str, ...] = ("ids",) if name in self.reads_tokens else ()
            if (routed := self.routed.get(name)) is not None:
                made, wired = self._layer(name, routed)
                *inner, (_, unit) = made.items()
                units |= dict(inner)
                reads |= {**wired, f"{name}.router": (before,)}
                tokens = {f"{name}.router.tokens": tuple(range(SENT, SENT + routed.carried))}
                ports[f"{name}.router"] = {**expert_rows.ports(name, shared=False), **tokens}
                extras[f"{name}.router"] = (*ids, *(["draws"] if "router" in routed.draws else []))
                if self._ep > 1:
                    between |= exchanges(name, ExpertGroup.among(self._ep))
            else:
                reads[key] = (before,)
            wants = ids if routed is None else ()
            drops = name in self._cut.wants_draws if routed is None else "add" in routed.draws
            wants += ("draws",) if drops else ()
            if name in self._cut.shape_only:
                unit = TokenShapeChunk(unit)
            if name == self.chunks[-1]:
                shared = RankRegion(self.words, self._region.cp)
                unit, wants = TokenLoss(unit, shared), (*wants, "labels", "scale")
            units[key], extras[key] = unit, wants
        given = {u: wants for u, wants in extras.items() if wants}
        kept = {n: params[n] for n in self.shapes if n in params}
        return BuiltChunks(units, kept, given, reads, ports, between, frozen)

    def _layer(self, name: str, cut: ExpertChunk) -> tuple[dict[str, nn.Module], dict[str, tuple[str, ...]]]:
        """A layer with experts: its units, and what each behind the first reads."""
        experts, spread = next(self._experts[name].parameters()).shape[0] * self._ep, self._ep > 1
        units: dict[str, nn.Module] = {
            "router": UserExpertRouter(cut.router, cut.top_k, experts, self._region),
            "experts": UserExpertsOfOneRank(UserExperts(self._experts[name])),
            "add": UserExpertAdd(cut.add, cut.top_k, self._region),
        }
        wired = {
            "experts": ("dispatch",) if spread else ("router.rows", "router.counts"),
            "add": ("combine" if spread else "experts", "router.order", "router.tokens"),
        }
        named = {f"{name}.{u}": tuple(f"{name}.{r}" for r in reads) for u, reads in wired.items()}
        return {f"{name}.{u}": module for u, module in units.items()}, named

    @property
    def read(self) -> frozenset[str]:
        """Parameters and buffers that some chunk reads."""
        held = [*self.module.named_parameters(), *self.module.named_buffers()]
        used = {id(t) for c in self.chunks for m in self._modules(c) for t in (*m.parameters(), *m.buffers())}
        return frozenset(n for n, t in held if id(t) in used)

    def keep(self, chunks: Sequence[str]) -> None:
        """Let go of every value that none of these chunks reads.

        All are drawn, as each depends on those before it; behind that, a rank needs no more than its own stages.
        """
        kept = [m for c in chunks for m in self._modules(c)]
        mine = {id(t) for chunk in kept for t in (*chunk.parameters(), *chunk.buffers())}
        for t in (*self.module.parameters(), *self.module.buffers()):
            if id(t) not in mine:
                t.data = t.data.new_empty(0)
        self._fill(*kept)

    def check_values(self) -> None:
        """Raise PiperError (io): the files have other tensors than its parameters and the buffers that are saved."""
        if self._given is not None:
            self._given.check()

    def _fill(self, *parts: nn.Module) -> None:
        """What the files have of them, as far as this rank holds it. Raises PiperError (io)."""
        if self._given is not None:
            self._given.fill(*parts)

    def _weights(
        self, files: HubCheckpoint, frozen: Mapping[str, tuple[int, ...]], left: Mapping[str, tuple[int, ...]]
    ) -> UserModelWeights:
        """frozen: also what nobody reads, which files may have, as they may what is left: unread, but not frozen."""
        named, every = self._names | self._frozen, {**self.shapes, **frozen, **left}
        sizes = {n: every[n] for n, _ in self.module.named_parameters()}  # in its order
        cuts, tp, buffers = dict[str, tuple[ShardCut, ...]](), self._region.tp, saved_buffers(self.module, files)
        for i, name in named.items():
            if (shard := self._stacked.get(i)) is not None:
                cuts[name] = (ShardCut(0, shard.index, shard.ep, sizes[name][:1]),)
            if (dim := self.dims.get(name)) is not None:
                cuts[name] = (*cuts.get(name, ()), ShardCut(dim, tp.index, tp.size, (sizes[name][dim],)))
        shapes = {id(t): tuple(t.shape) for t in self.module.buffers()}
        shares = {n: ParamShard(sizes[n], c) for n, c in cuts.items()}
        given, lost = {n: shapes[i] for i, n in buffers.items()}, {n for n in self.shapes if files.lacks(n, sizes[n])}
        return UserModelWeights(files, named | buffers, sizes, given, shares, lost, frozen)

    def refuse_training(self) -> None:
        """Raise PiperError for modules that would not train the same under every plan."""
        refuse_training(self.module, self._cut, self.live)
        sizes = {"tp": self._region.tp.size, "cp": self._region.cp.size}
        for name in self._hooked:
            ep = {"ep": self._ep} if id(self.module.get_parameter(name)) in self._stacked else {}
            refuse_hook(name, sizes | ep)

    def refuse_impure(self, size: int, length: int) -> None:
        """Try forward, without values, on microbatches of `size` sequences of `length` tokens.

        Raises PiperError (model): a chunk's result depends on more than parameters and inputs.
        """
        with TRACING:
            again = cut(self.module) if self.live else self._cut  # what was exported is code without a host
        for name, chunk in self._cut.chunks.items():
            if _code(chunk) != _code(again.chunks.get(name)):
                raise unrepeatable(
                    f"{name} is traced differently each time", "code without the clock or the host", "fix it"
                )
        with TRACING:
            without_values(lambda: self._try(size, length, refuse_impure))

    def refuse_unlike(self, words: int, ep: int) -> None:
        """Hold what was exported, and a rank's experts, against the module's own code, called twice without values,
        and by values where that takes no time: torch.export may have gone another way than it goes by itself.

        Raises PiperError (model): another call makes something else, or the graph does, or `grouped`.
        """
        left = MOST_PRODUCTS
        for name, found in self.routed.items():
            if left > 0:  # of large ones those of the first layers
                self._fill(self._experts[name])
                left -= refuse_unlike_experts(f"{name}'s experts", self._experts[name], found, ep, MOST_FOR_EXPERTS)
        if self.live:
            return
        batch, modules = self._batch, [copy_of(self._fresh) for _ in range(2)]
        ids = (torch.arange(prod(batch), device="cpu") % words).view(batch)
        given = options(self._fresh)
        with TRACING:
            refuse_memory(
                modules[0],
                lambda x: logits_of(modules[0](x, **given), batch),
                ids,
                self._backward,
                bool(self._cut.wants_draws),
            )
        short = sum(prod(shape) for shape in self.shapes.values()) * ids.numel() <= MOST_PRODUCTS
        if short and self._region.tp.size * self._region.cp.size == 1 and not self._cut.wants_draws:
            self._fill(self.module)
            with TRACING:
                refuse_unlike(
                    lambda: logits_of(modules[1](ids, **given), batch),
                    lambda: self._try(*batch, lambda _, chunk, x: outputs(chunk(*x)), ids)[0],
                    "what torch.export took of forward",
                    "one forward, whether it is exported or not",
                )

    @property
    def _backward(self) -> bool:
        """Whether some of the user's code runs in backward: that of functions, or hooks of parameters."""
        nodes = [n for c in self._cut.chunks.values() if isinstance(c, fx.GraphModule) for n in c.graph.nodes]
        return any(is_own(n) for n in nodes) or any(p._backward_hooks for p in self.module.parameters())

    def _try(self, size: int, length: int, call: ChunkCall, ids: Tensor | None = None) -> tuple[Tensor, ...]:
        """Forward, chunk by chunk; the logits."""
        ids = torch.zeros(size, length, dtype=torch.int64, device="cpu") if ids is None else ids
        x: tuple[Tensor, ...] = (ids,)
        for name, chunk in self._cut.chunks.items():
            more: tuple[Tensor, ...] = (ids,) if name in self._cut.wants_ids else ()
            more += (torch.zeros(3, dtype=torch.int64, device="cpu"),) if name in self._cut.wants_draws else ()
            x = call(name, chunk, (*x, *more))
        return x


class TokenShapeChunk(nn.Module):
    """A chunk that reads of the token ids their sizes only, which its input has too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """x (sequences, tokens, …)."""
        found: Tensor = self.inner(x, torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device), *more)
        return found


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """What is of floating point, in another format; `Module.to` would make complex numbers real.

    >>> net = nn.Module(); net.register_buffer("turns", torch.ones(2) * 1j); _cast(net, torch.float64).turns[0].item()
    1j
    """
    module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
    return module


def _code(chunk: nn.Module | None) -> str:
    """What a chunk calls, with its constants."""
    return str(chunk.graph) if isinstance(chunk, fx.GraphModule) else ""

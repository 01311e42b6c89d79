"""What of a user's module no plan could train exactly: refused before any rank starts."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import fx, nn

from executor.modules.user.annotate import ChunkedModel, model_error
from ir.core.errors import ErrorKind, PiperError


def checked_module(made: object) -> nn.Module:
    """What build() has made. Raises PiperError (model): no module, or one of sparse gradients.

    >>> checked_module(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    Traceback (most recent call last):
    ...
    ir.core.errors.PiperError: model.module: 0 makes sparse gradients, which no sum over microbatches here takes
    allowed: dense gradients
    fix: sparse = False
    """
    if not isinstance(made, nn.Module):
        raise PiperError(ErrorKind.MODEL, f"build() returned {type(made).__name__}", allowed="a torch.nn.Module")
    for name, part in made.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            message = f"{name} makes sparse gradients, which no sum over microbatches here takes"
            raise model_error(message, "sparse = False", "dense gradients", "model.module")
    return made


def refuse_untrained(trained: Collection[str]) -> None:
    """Raise PiperError (model) where nothing is trained.

    >>> refuse_untrained(["head.weight"])
    """
    if not trained:
        message, fix = "no parameter requires a gradient", "requires_grad_() of those that are to be trained"
        raise model_error(message, fix, "a module that has something to train", "model.module")


def refuse_unread(idle: Sequence[str]) -> None:
    """Raise PiperError (model) where there are parameters that nothing reads."""
    if idle:
        message = f"{idle[0]} and {len(idle) - 1} more parameters are" if len(idle) > 1 else f"{idle[0]} is"
        fix = "leave out what logits are not made of: the first output of sequences, tokens and features"
        raise model_error(f"{message} read by no chunk", fix, key="model.module")


def refuse_hook(name: str, ranks: Mapping[str, int]) -> None:
    """Raise PiperError (model) where several ranks have a parameter whose gradient has a hook, of some axis: each would
    call it with what it has of that, or adds to it.
    """
    if axis := next((a for a, n in ranks.items() if n > 1), None):
        message = f"{name} has a hook of its gradient, of which each rank of {axis} has a part"
        raise model_error(message, f"{axis} = 1, or leave it out", "hooks of whole gradients", "model.module")


def refuse_training(module: nn.Module, cut: ChunkedModel, live: bool) -> None:
    """Raise PiperError for modules that would not train the same under every plan. live: they run themselves."""
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p and live:
            raise unrepeatable(f"{name} drops out", "dropout of a model cut by path", 'tags = { PP = "…" }')
        if not live and (part._backward_hooks or part._backward_pre_hooks):
            raise unrepeatable(f"{name} has a hook of its gradient", "an exported graph, without hooks", "leave it out")
        if getattr(part, "track_running_stats", False):
            raise unrepeatable(f"{name} keeps running statistics", "sums over microbatches alone", "LayerNorm")
    if cut.loss:
        message = f"forward returns a loss of its own ({cut.loss})"
        fix = "return logits alone (output_router_logits = False)"
        raise model_error(message, fix, "logits: a run's loss is that of the next tokens", "model.module")
    if late := [n for n, p in module.named_parameters() if p._post_accumulate_grad_hooks]:
        message, fix = f"{late[0]} has a hook behind its sum of gradients, which nobody would call", "leave it out"
        raise model_error(message, fix, "Tensor.register_hook of a parameter", "model.module")
    uses = Counter(id(p) for chunk in cut.chunks.values() for p in _read(chunk))
    if twice := [n for n, p in module.named_parameters() if p._backward_hooks and uses[id(p)] > 1]:
        message = f"{twice[0]} is read twice, and has a hook of its gradient, which would be called for each part"
        fix, allowed = "an autograd.Function in its place", "hooks of parameters that are read once"
        raise model_error(message, fix, allowed, "model.module")
    if turned := [n for n, p in module.named_parameters() if p.is_complex()]:
        message, fix = f"{turned[0]} is complex, which no optimizer here updates", "torch.view_as_complex(real)"
        raise model_error(message, fix, "real parameters; buffers may be complex", "model.module")


def _read(chunk: nn.Module) -> Iterator[nn.Parameter]:
    """A chunk's parameters, each as often as it is read, as far as its graph says it."""
    params = dict(chunk.named_parameters(remove_duplicate=False))
    nodes = chunk.graph.nodes if isinstance(chunk, fx.GraphModule) else ()
    held = [n for n in nodes if n.op == "get_attr" and n.target in params]
    yield from (params[str(n.target)] for n in held for _ in n.users)
    yield from (p for name, p in params.items() if name not in {n.target for n in held})


def unrepeatable(what: str, allowed: str, fix: str) -> PiperError:
    """The refusal of what does not do the same each time."""
    message = f"{what}, which no plan could repeat exactly"
    return model_error(message, fix, allowed, "model.module")

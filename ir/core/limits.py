"""How large a schedule or job may be; checked before anything is expanded, so that a typo eats no memory."""

from collections.abc import Iterable, Mapping
from math import isqrt

from ir.core.errors import ErrorKind, PiperError, job_error

PASSES = 1_000_000  # F, I, W of every stage and microbatch; about a minute and 2 GB to simulate
NODES = 4_000_000  # of a model's graph, times microbatches; as much
LAYERS = 1_000
RANKS = 262_144  # replicas are alike and folded; a hundred thousand GPUs take what a thousand take
BYTES = 2**53  # of one buffer, and parameters of a model; sums then stay within 64 bits


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending; of a very large n those up to a million, for a search must end.

    >>> divisors(12), divisors(10**18 + 9)[-1], len(divisors(10**12))
    ([1, 2, 3, 4, 6, 12], 1, 169)
    """
    low = [d for d in range(1, min(isqrt(n), PASSES) + 1) if n % d == 0]
    return low if n > PASSES**2 else sorted({*low, *(n // d for d in low)})


def check_passes(stages: int, microbatches: int, kind: ErrorKind = ErrorKind.JOB) -> None:
    """Refuse more passes than one machine simulates.

    Raises PiperError (`kind`): stages x microbatches are too many to simulate.

    >>> check_passes(64, 1024)
    >>> check_passes(4, 10**9)
    Traceback (most recent call last):
    ir.core.errors.PiperError: schedule.microbatches: 4 stages x 1000000000 microbatches are too many to simulate
    allowed: stages x microbatches <= 333333
    fix: 83333 microbatches
    """
    most = PASSES // 3
    if stages * microbatches > most:
        few = max(1, most // stages)
        raise PiperError(
            kind,
            f"{stages} stages x {microbatches} microbatches are too many to simulate",
            key="schedule.microbatches" if stages <= RANKS else "parallel.pp",
            allowed=f"stages x microbatches <= {most}",
            suggestion=f"{few} microbatches" if stages <= RANKS else "fewer ranks",
        )


def check_nodes(nodes: int, microbatches: int) -> None:
    """Refuse a model graph too large once every node has its microbatches.

    Raises PiperError (job): nodes x microbatches are too many.
    """
    if nodes * microbatches > NODES:
        message = f"{nodes} ops per microbatch x {microbatches} microbatches are too many to simulate"
        few = f"{max(1, NODES // nodes)} microbatches"
        raise job_error("schedule.microbatches", message, few, f"a product <= {NODES}")


def check_layers(overrides: Mapping[str, object]) -> None:
    """Refuse more layers than a model has, before they are counted out one by one. overrides: inline keys.

    Raises PiperError (model): more layers than the limit.
    """
    for key in ("num_hidden_layers", "n_layer", "n_layers"):
        layers = overrides.get(key)
        if isinstance(layers, int) and layers > LAYERS:
            message, allowed = f"{layers} layers", f"at most {LAYERS}"
            raise PiperError(
                ErrorKind.MODEL, message, key=f"model.{key}", allowed=allowed, suggestion=f"{key} = {LAYERS}"
            )


def check_bytes(buffers: Iterable[int]) -> None:
    """Refuse activations that no machine of this century holds; their sums would not fit 64 bits.

    Raises PiperError (job): a buffer's bytes are beyond the limit.
    """
    if (most := max(buffers, default=0)) > BYTES:
        message, fix = f"one activation has {most:.3g} bytes", "a smaller seq_len, microbatch_size or model"
        raise job_error("model.seq_len", message, fix, f"{BYTES:.3g} bytes")


def check_parameters(counts: Iterable[int]) -> None:
    """Refuse a model whose parameters' bytes would not fit 64 bits.

    Raises PiperError (model): more parameters than the limit.
    """
    if (total := sum(counts)) > BYTES:
        message = f"the model has {total:.3g} parameters"
        raise PiperError(
            ErrorKind.MODEL, message, key="model", allowed=f"at most {BYTES:.3g}", suggestion="a smaller model"
        )


def check_ranks(ranks: int, key: str) -> None:
    """Refuse more GPUs than a job may have.

    Raises PiperError (job): more ranks than the limit.
    """
    if ranks > RANKS:
        raise job_error(key, f"{ranks} GPUs", "fewer nodes: replicas are alike", f"at most {RANKS}")

"""`replicate`: keep the copies of parameters in step, with ZeRO 0 to 3."""

from dataclasses import dataclass, replace

from ir.core.errors import directive_error
from ir.core.filters import DirectiveFilter
from ir.directives.select import select
from ir.graph.graph import BucketPolicy, Graph


@dataclass(frozen=True)
class ReplicateDirective:
    """Synchronise the gradients of the selected parts over the owners of their parameters.

    rewrite, once per step and bucket (every W joins its own member's microbatches):
        zero 0    W -> AR -> UPDATE
        zero 1    W -> RS -> UPDATE (a shard) -> AG
        zero 2    as 1, but an RS after every microbatch's W: whole gradients never stay
        zero 3    as 2, with an AG before F and before backward in place of the one at the end
    dp_replicate n: shards lie over an n-th of the replicas; what they sum, an AR sums over the n that hold the same:
        zero 1    W -> RS -> AR -> UPDATE -> AG
        zero 2, 3 once behind all microbatches' RS
    """

    filter: DirectiveFilter
    zero: int = 0
    bucket_MiB: float | None = None
    reduce_stream: str = "dp"
    gather_stream: str = "dp"
    dp_replicate: int = 1

    def __str__(self) -> str:
        return f"replicate({self.filter}, zero={self.zero})"

    def json(self) -> dict[str, object]:
        """The directive as in a strategy file."""
        out: dict[str, object] = {"op": "replicate", "filter": self.filter.json(), "zero": self.zero}
        if self.bucket_MiB is not None:
            out["bucket_MiB"] = self.bucket_MiB
        if self.reduce_stream != "dp":
            out["reduce_stream"] = self.reduce_stream
        if self.gather_stream != "dp" or self.reduce_stream != "dp":  # left out, it is the other
            out["gather_stream"] = self.gather_stream
        if self.dp_replicate != 1:
            out["dp_replicate"] = self.dp_replicate
        return out

    def __call__(self, graph: Graph) -> Graph:
        if self.zero not in (0, 1, 2, 3):
            raise directive_error(f"{self}: zero is a level", "0, 1, 2, 3")
        if self.bucket_MiB is not None and not self.bucket_MiB > 0:
            raise directive_error(f"{self}: bucket_MiB = {self.bucket_MiB}", "more than 0")
        self._divides(graph)
        hit = {(graph.nodes[i].stage, graph.nodes[i].part) for i in select(graph, self.filter, str(self))}
        self._whole(graph)
        size = None if self.bucket_MiB is None else int(self.bucket_MiB * 2**20)
        policy = BucketPolicy(self.zero, size, self.reduce_stream, self.gather_stream, self.dp_replicate)
        mine = {k: policy for k, e in enumerate(graph.entries) if (e.stage, e.name) in hit}
        if graph.entries and not any(graph.entries[k].part.params for k in mine):
            message = f"{self}: what the filter selects has no parameters"
            raise directive_error(message, "parts with parameters")
        return replace(graph, replicas={**graph.replicas, **mine})

    def _divides(self, graph: Graph) -> None:
        """Refuse copies of shards where there are no shards, or in other parts than the mesh has."""
        parts = 1 if graph.mesh is None else graph.mesh.sizes.get("dp_replicate", 1)
        if self.dp_replicate not in (1, parts):
            said = f"{self}: dp_replicate = {self.dp_replicate}, and the mesh has {parts}"
            raise directive_error(said, sorted({"1", str(parts)}), f"dp_replicate = {parts}")
        if self.dp_replicate > 1 and self.zero == 0:
            message = f"{self}: dp_replicate = {self.dp_replicate} copies shards, and zero = 0 makes none"
            raise directive_error(message, "zero = 1, 2, 3", "dp_replicate = 1")

    def _whole(self, graph: Graph) -> None:
        """Refuse some of the microbatches: a parameter's copies are kept in step for all that it is used for."""
        if self.filter.microbatches(graph.dim, graph.mbs) == (range(graph.mbs),):
            return
        raise directive_error(
            f"{self}: the filter selects some of {graph.mbs} microbatches, but a parameter is updated for all of them",
            f"filters without {graph.dim}",
            f"leave {graph.dim} out",
        )

"""Which storages the plan itself gives and takes on a rank: what crosses stages, what is gathered or reduced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ir.plan.plan import AT_START, OpKind, Plan
from piper_sim.memory.splice_sync import Flat
from piper_sim.memory.splice_wiring import Wiring

Value = tuple[int, int, int]  # (node, slot, microbatch); of what a collective is about (NAMED, its row, microbatch)
At = tuple[int, int]  # (op, cover)
NAMED = -1


@dataclass(frozen=True)
class Table:
    """births: (op, cover) → values that begin there, before the cover runs, with their bytes. frees: those that end.

    A free at AT_START comes before the op's first cover. What is inside a stage is not in here: it dies with its unit.
    """

    births: dict[At, list[tuple[Value, int]]] = field(default_factory=lambda: defaultdict(list))
    frees: dict[At, list[Value]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, plan: Plan, program: int, wiring: Wiring, flat: Mapping[str, Flat]) -> Table:
        """One program's, on a rank that holds these buckets so."""
        out, b = cls(), plan.buffers
        rows = range(int(plan.bounds[program]), int(plan.bounds[program + 1]))
        for k, made in enumerate(b.alloc.tolist()):
            if made not in rows:
                continue
            node, slot, mb = int(b.node[k]), int(b.slot[k]), int(b.mb[k])
            end = int(b.free[k]), max(int(b.free_cover[k]), AT_START)
            if node >= 0:
                if wiring.crosses.get(node) == slot:
                    out.frees[end].append((node, slot, mb))
                continue
            shape = plan.shapes[int(plan.shape[slot])]
            if shape.kind is OpKind.COLLECTIVE:
                value, bucket = (NAMED, slot, mb), flat[shape.bucket]
                size = bucket.whole if made == slot else bucket.passing
                out.births[made, int(b.alloc_cover[k])].append((value, size))
            else:
                assert shape.slot is not None
                value = (*shape.slot, int(plan.mb[slot]))
            out.frees[end].append(value)
        return out

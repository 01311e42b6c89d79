"""A plan in the making: rows with sort keys, and which row holds which (node, microbatch)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ir.core.ops import OpToken, ScheduledOp
from ir.core.order import IntArray, Order
from ir.core.waits import order_by
from ir.graph.graph import Graph, MicrobatchSpan, illegal
from ir.lower.policy import PlanPolicy
from ir.lower.template import PlanTemplateKey, PlanTemplates
from ir.plan.plan import OpKind, covers_of, spread

Edges = tuple[IntArray, IntArray, IntArray, IntArray]  # between programs: edge, microbatch, receive, reader row
STEP = 8  # distance of neighbouring base rows in sort keys, so that others fit between


@dataclass
class PlanRows:
    """Columns of provisional rows. Base rows (from the orders) come first, program by program."""

    program: IntArray
    shape: IntArray
    mb: IntArray
    mb2: IntArray
    unit: IntArray
    key: IntArray
    sub: IntArray

    def __len__(self) -> int:
        return len(self.program)

    def extend(self, **columns: IntArray) -> IntArray:
        """Append rows; returns their ids. Columns left out are filled with -1 (mb2) or 0."""
        n = len(columns["program"])
        first = len(self)
        default = {"mb": -1, "mb2": -1, "unit": -1, "sub": 0}
        for name in ("program", "shape", "mb", "mb2", "unit", "key", "sub"):
            new = columns.get(name)
            if new is None:
                new = np.full(n, default[name], dtype=np.int64)
            setattr(self, name, np.concatenate([getattr(self, name), np.asarray(new, dtype=np.int64)]))
        return np.arange(first, first + n)


@dataclass
class PlanBuilder:
    """Everything lowering collects before rows get their final places."""

    graph: Graph
    policy: PlanPolicy
    templates: PlanTemplates
    rows: PlanRows
    start: IntArray  # first base row of each program, and the end of base rows
    inst: IntArray  # [node, mb] -> base row, -1
    cover: IntArray  # [node, mb] -> index into its row's covers
    waits: list[tuple[IntArray, IntArray]] = field(default_factory=list)  # (row, waits for row)
    messages: tuple[IntArray, IntArray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    collectives: list[list[int]] = field(default_factory=list)
    buffers: list[dict[str, IntArray]] = field(default_factory=list)
    once_rows: dict[tuple[int, int], int] = field(default_factory=dict)
    reductions: list[tuple[list[int], list[int]]] = field(default_factory=list)  # members, their last contributions
    further: list[tuple[int, int]] = field(default_factory=list)  # a reduction's row, that of what it sums further
    recv_of: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    behind: IntArray = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # [stage, mb]: see `_behind`

    def kinds(self) -> IntArray:
        """`OpKind` of each row."""
        return np.array([s.kind for s in self.templates.shapes], dtype=np.int64)[self.rows.shape]

    def local(self, row: IntArray) -> IntArray:
        """Position of base rows within their program."""
        return row - self.start[self.rows.program[row]]

    def text(self, row: int) -> str:
        """Op text of a row, for errors."""
        r = self.rows
        return self.templates.shapes[int(r.shape[row])].stamp(int(r.mb[row]), int(r.mb2[row]))

    def wait(self, row: IntArray, on: IntArray) -> None:
        """`row` waits for `on`."""
        self.waits.append((np.asarray(row, dtype=np.int64), np.asarray(on, dtype=np.int64)))


def classes(graph: Graph) -> IntArray:
    """Microbatches that every placement treats alike share a class.

    >>> from ir.graph.build import stage_graph
    >>> classes(stage_graph(2)).tolist()
    [0]
    """
    cuts = {0, graph.mbs}
    spans: set[MicrobatchSpan] = {s for n in graph.nodes for s in n.spans}
    for s in spans:
        if s.mbs is not None:
            cuts |= {s.mbs.start, s.mbs.stop}
    edges = np.array(sorted(cuts))
    return np.asarray(np.searchsorted(edges, np.arange(graph.mbs), side="right") - 1, dtype=np.int64)


def stage_homes(graph: Graph, cls: IntArray) -> dict[tuple[int, int], int]:
    """The program of each (stage, microbatch class). Refuses a stage whose chunks are placed apart.

    Raises PiperError (illegal_plan): a stage placed nowhere, or on two groups.
    """
    home: dict[tuple[int, int], int] = {}
    first = {int(c): int(np.argmax(cls == c)) for c in np.unique(cls)}
    for n in graph.nodes:
        if n.once:
            continue
        for c, mb in first.items():
            group = next((s.group for s in n.spans if s.mbs is not None and mb in s.mbs), None)
            if group is None:
                raise illegal(f"{n.text(mb)} is placed nowhere", f'place({{"PP": {n.stage}}}, …)')
            if home.setdefault((n.stage, c), group) != group:
                raise illegal(
                    f"{n.text(mb)} is on group {group}, the rest of stage {n.stage} on {home[n.stage, c]}",
                    "a stage is placed as a whole; cut the model into more stages",
                )
    return home


def stamp(
    graph: Graph, policy: PlanPolicy, orders: dict[int, Order], sharded: Mapping[int, frozenset[str]]
) -> PlanBuilder:
    """Base rows: every unit of every order replaced by its template."""
    cls = classes(graph)
    templates = PlanTemplates(graph, policy, stage_homes(graph, cls), sharded)
    parts = [_program(p, orders[p], cls, templates) for p in sorted(orders)]
    column = [np.concatenate(c) for c in zip(*parts, strict=True)]
    start = np.concatenate([[0], np.cumsum([len(p[0]) for p in parts])]).astype(np.int64)
    program, shape, mb, mb2, unit, key = column
    rows = PlanRows(program, shape, mb, mb2, unit, key, np.zeros(len(program), np.int64))
    inst, cover = _instances(graph, templates, rows)
    made = PlanBuilder(graph, policy, templates, rows, start, inst, cover)
    made.behind = _behind(made, orders)
    return made


def _behind(draft: PlanBuilder, orders: Mapping[int, Order]) -> IntArray:
    """[stage, mb] -> the first compute row behind the place that an order has for a backward that is not there; -1.

    Where it is there, what stands behind it waits for what its readers have sent back.
    """
    out = np.full((draft.graph.stages, draft.graph.mbs), -1, dtype=np.int64)
    silent = np.array(sorted(draft.graph.silent), dtype=np.int64)
    computes = draft.kinds() == OpKind.COMPUTE
    for p, order in orders.items() if len(silent) else ():
        rows = np.arange(draft.start[p], draft.start[p + 1])
        rows = rows[computes[rows]]
        at = np.flatnonzero(np.isin(order.stage, silent) & np.isin(order.token, [int(OpToken.B), int(OpToken.I)]))
        next_ = np.searchsorted(draft.rows.unit[rows], order.unit[at], side="right")
        some = next_ < len(rows)
        out[order.stage[at[some]], order.mb[at[some]]] = rows[next_[some]]
    return out


def _program(p: int, order: Order, cls: IntArray, templates: PlanTemplates) -> tuple[IntArray, ...]:
    """Columns of one program's base rows, vectorised over units."""
    _known(p, order, templates.graph)
    n_units = int(order.unit[-1]) + 1
    first = np.searchsorted(order.unit, np.arange(n_units))
    width = np.diff(np.append(first, len(order)))
    widest = int(width.max())
    place = np.minimum(first[:, None] + np.arange(widest), len(order) - 1)
    real = np.arange(widest) < width[:, None]
    mb = np.where(real, order.mb[place], -1)
    stage = np.where(real, order.stage[place], -1)
    token = np.where(real, order.token[place], -1)
    class_of = np.where(real, cls[np.maximum(mb, 0)], -1)
    last = _ends(order, n_units, templates)
    wide = np.concatenate([stage, token, class_of, last[:, None]], axis=1)
    base = int(wide.max()) + 2
    code = np.zeros(n_units, dtype=np.int64)
    for c in range(wide.shape[1]):
        if base ** (c + 1) > 2**62:  # number what there is so far, and go on
            code = np.unique(code, return_inverse=True)[1]
        code = code * base + wide[:, c] + 1
    _, example, kind = np.unique(code, return_index=True, return_inverse=True)
    tables = []
    for u in example.tolist():
        w = int(width[u])
        members = tuple(zip(stage[u, :w].tolist(), token[u, :w].tolist(), strict=True))
        classes = tuple(class_of[u, :w].tolist())
        for (s, t), c, m in zip(members, classes, mb[u, :w].tolist(), strict=True):
            if templates.home[s, c] != p:
                text = ScheduledOp(s, OpToken(t), m)
                raise illegal(f"program {p} is to run {text}, but stage {s} is on program {templates.home[s, c]}")
        key = PlanTemplateKey(p, members, classes, bool(last[u]))
        tables.append(np.array(templates.build(key), dtype=np.int64).reshape(-1, 3))
    lengths = np.array([len(t) for t in tables], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    table = np.concatenate(tables)
    count = lengths[kind]
    unit = np.repeat(np.arange(n_units), count)
    ends = np.cumsum(count)
    at = np.arange(int(ends[-1])) - np.repeat(ends - count, count) + np.repeat(offsets[kind], count)
    shape, m1, m2 = table[at].T
    mb1 = mb[unit, m1]
    mb2 = np.where(m2 >= 0, mb[unit, np.maximum(m2, 0)], -1)
    total = len(at)
    return (np.full(total, p, np.int64), shape, mb1, mb2, unit, np.arange(total, dtype=np.int64) * STEP)


def _ends(order: Order, units: int, templates: PlanTemplates) -> IntArray:
    """1 for units with the last weight gradients of a stage, where several reductions wait for them."""
    out = np.zeros(units, dtype=np.int64)
    makes = np.isin(order.token, [int(OpToken.B), int(OpToken.W)])
    latest = np.full(templates.graph.stages, -1, dtype=np.int64)
    np.maximum.at(latest, order.stage[makes], order.unit[makes])
    out[[unit for stage, unit in enumerate(latest.tolist()) if unit >= 0 and stage in templates.divided]] = 1
    return out


def _known(p: int, order: Order, graph: Graph) -> None:
    """Refuse an order that is empty or names what the graph does not have."""
    if not len(order):
        raise illegal(f"program {p} has an empty order", "order every action of what is placed on it")
    strange = (order.stage >= graph.stages) | (order.mb >= graph.mbs) | (order.stage < 0) | (order.mb < 0)
    if strange.any():
        text = order.actions()[int(strange.argmax())]
        raise illegal(f"program {p}: {text}: there are {graph.stages} stages and {graph.mbs} microbatches")


def _instances(graph: Graph, templates: PlanTemplates, rows: PlanRows) -> tuple[IntArray, IntArray]:
    """[node, mb] -> row and cover index; refuses what an order runs twice."""
    inst = np.full((len(graph.nodes), graph.mbs), -1, dtype=np.int64)
    place = np.zeros_like(inst)
    shape, cover, node, member = covers_of(templates.shapes).T
    row, at = spread(shape, rows.shape, len(templates.shapes))
    n, m, c = node[at], np.where(member[at] == 0, rows.mb[row], rows.mb2[row]), cover[at]
    inst[n, m], place[n, m] = row, c
    if (inst >= 0).sum() < len(row):
        k = int(row[_twice(n * graph.mbs + m, c, row)])
        text = templates.shapes[int(rows.shape[k])].stamp(int(rows.mb[k]), int(rows.mb2[k]))
        raise illegal(f"program {int(rows.program[k])}: {text} runs twice", "name every action once in its order")
    return inst, place


def _twice(what: IntArray, cover: IntArray, row: IntArray) -> int:
    """The first by cover, then row, that was there at an earlier cover, or comes again at the same."""
    by = order_by(cover, row)
    order = np.arange(len(by))
    _, first, which = np.unique(what[by], return_index=True, return_inverse=True)
    last = np.zeros((len(first), int(cover.max()) + 1), dtype=np.int64)
    np.maximum.at(last, (which, cover[by]), order)
    bad = (cover[by] > cover[by][first[which]]) | (last[which, cover[by]] > order)
    return int(by[bad.argmax()])


def producers(draft: PlanBuilder, send: IntArray) -> IntArray:
    """The base row that produces what each send carries."""
    shapes = draft.templates.shapes
    node = np.array([s.slot[0] if s.slot else 0 for s in shapes], dtype=np.int64)
    out: IntArray = draft.inst[node[draft.rows.shape[send]], draft.rows.mb[send]]
    return out

"""The repository's Python files as the house's rules see them: syntax trees, imports, folders, floors."""

from __future__ import annotations

import ast
import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PRODUCTION = ("ir", "cost_models", "piper_sim", "executor", "experiments")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Edges = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Source:
    """Python files by path from the root, and the project file. production: the packages that are not tests."""

    files: Mapping[str, str]
    project: str = "[project]\n"

    @classmethod
    def read(cls, root: Path) -> Source:
        """What lies in a checkout."""
        paths = [p for top in (*PRODUCTION, "tests") for p in sorted((root / top).rglob("*.py"))]
        files = {p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in paths}
        return cls(files, (root / "pyproject.toml").read_text(encoding="utf-8"))

    def lines(self, *, tests: bool) -> int:
        """How many lines the tests have, or everything else."""
        return sum(text.count("\n") for path, text in self.files.items() if _is_test(path) == tests)

    @cached_property
    def production(self) -> Mapping[str, str]:
        """Path of every file that is no test -> its text."""
        return {path: text for path, text in self.files.items() if not _is_test(path)}

    @cached_property
    def trees(self) -> Mapping[str, ast.Module]:
        """Module -> its syntax tree, tests too."""
        collecting = gc.isenabled()
        gc.disable()  # a million nodes that stay: the collector would go through them again and again
        try:
            return {module_of(path): ast.parse(text) for path, text in self.files.items()}
        finally:
            gc.freeze()
            if collecting:
                gc.enable()

    @cached_property
    def nodes(self) -> Mapping[str, tuple[ast.AST, ...]]:
        """Module -> all nodes of its tree."""
        return {module: tuple(ast.walk(tree)) for module, tree in self.trees.items()}

    @cached_property
    def words(self) -> Mapping[str, Counter[str]]:
        """Module -> how often it reads each name, `.name` where it is an attribute."""
        return {
            module: Counter(
                n.id if isinstance(n, ast.Name) else f".{n.attr}"
                for n in nodes
                if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Load)
            )
            for module, nodes in self.nodes.items()
        }

    @cached_property
    def modules(self) -> Mapping[str, str]:
        """Production module -> its path."""
        return {module_of(path): path for path in self.production}

    @cached_property
    def imports(self) -> Mapping[str, Mapping[str, frozenset[str]]]:
        """Module -> the production modules it imports, lazily too -> the names it takes (`*`: the module itself)."""
        return {module: self._imports(module, path) for path in self.files for module in (module_of(path),)}

    def _imports(self, module: str, path: str) -> Mapping[str, frozenset[str]]:
        out: dict[str, set[str]] = {}
        for name, taken in _imported(self.nodes[module], _package(module, path)):
            whole = f"{name}.{taken}"
            target, what = (whole, "*") if whole in self.modules else (name, taken)
            while target and target not in self.modules:
                target = target.rpartition(".")[0]
            if target and target != module:
                out.setdefault(target, set()).add(what)
        return {target: frozenset(names) for target, names in out.items()}

    @cached_property
    def edges(self) -> Edges:
        """Production module -> the modules it imports."""
        return {m: frozenset(self.imports[m]) for m in self.modules}

    def floors(self, folder: str) -> int:
        """The longest chain of imports between a package's direct members; those of a circle share a floor."""
        members: dict[str, set[str]] = {}
        for module, targets in self.edges.items():
            if member := _member(folder, module):
                inside = {_member(folder, t) for t in targets} - {member, ""}
                members.setdefault(member, set()).update(inside)
        return longest({m: frozenset(t) for m, t in members.items()})


def _is_test(path: str) -> bool:
    return path.startswith("tests/")


def module_of(path: str) -> str:
    """`ir/job/__init__.py` is `ir.job`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _package(module: str, path: str) -> str:
    return module if path.endswith("/__init__.py") else module.rpartition(".")[0]


def _member(folder: str, module: str) -> str:
    return module.removeprefix(f"{folder}.").split(".")[0] if module.startswith(f"{folder}.") else ""


def _imported(nodes: Iterable[ast.AST], package: str) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "*") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((base, alias.name) for alias in node.names)


def circles(edges: Edges) -> list[tuple[str, ...]]:
    """Groups of nodes that reach one another.

    >>> circles({"a": frozenset("b"), "b": frozenset("a"), "c": frozenset("a")})
    [('a', 'b')]
    """
    left = _between(_between(edges, edges), {m: frozenset(n for n in edges if m in edges[n]) for m in edges})
    reach = {node: _reach(node, edges) for node in left}
    groups = {tuple(sorted(m for m in reach[n] if n in reach.get(m, ()))) for n in left}
    return sorted(g for g in groups if len(g) > 1)


def _between(nodes: Iterable[str], edges: Edges) -> set[str]:
    """Nodes from which one can go on for ever."""
    left = set(nodes)
    while ends := {n for n in left if not edges[n] & left}:
        left -= ends
    return left


def _reach(start: str, edges: Edges) -> set[str]:
    seen, todo = set[str](), [start]
    while todo:
        new = edges.get(todo.pop(), frozenset()) - seen
        seen |= new
        todo += new
    return seen


def longest(edges: Edges) -> int:
    """How many nodes the longest chain has, a circle counting as one.

    >>> longest({"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("b")})
    2
    """
    home = {n: group[0] for group in circles(edges) for n in group}

    @cache
    def below(node: str) -> int:
        group = [n for n in edges if home.get(n, n) == node]
        down = {home.get(t, t) for n in group for t in edges[n]} - {node}
        return 1 + max(map(below, down), default=0)

    return max((below(home.get(n, n)) for n in edges), default=0)


def public_functions(tree: ast.Module) -> Iterator[Function]:
    """Functions of the module and methods of its public classes whose names have no underscore in front."""
    bodies: Iterable[list[ast.stmt]] = [
        tree.body,
        *(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_"),
    ]
    return (n for body in bodies for n in body if isinstance(n, Function) and n.name[0] != "_")

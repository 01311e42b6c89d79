"""The house's rules: each gives what breaks it, one line a finding. The limits stand here and nowhere else."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath

from tests.house.source import Function, Source, circles, module_of, public_functions

MOST_PRODUCTION_LINES = 35_000
MOST_TEST_LINES = 22_000
MOST_FILES = 12
MOST_FLOORS = {"executor": 8, "ir": 6, "piper_sim": 7}
MOST_FUNCTION_LINES, MOST_PARAMETERS = 60, 8
MOST_TYPE_IGNORES = 15
IMPORTED_AS = {"pyyaml": "yaml", "protobuf": "google"}
TOOLS = {"pytest-xdist", "ruff", "mypy", "import-linter", "pandas-stubs", "mkdocs-material"}  # never imported
INERT = {"dataclass", "cache", "lru_cache", "contextmanager", "jit", "overload", "final", "total_ordering"}
_IMPORTS = re.compile(r"^[\w.]+:\w+$|\bimport \w")  # functions given by name, code for another process
Rule = Callable[[Source], list[str]]


def production_lines(source: Source) -> list[str]:
    """Production Python, experiments too, has a budget of lines."""
    return _over("production", source.lines(tests=False), MOST_PRODUCTION_LINES, "lines")


def tests_lines(source: Source) -> list[str]:
    """So do tests."""
    return _over("tests", source.lines(tests=True), MOST_TEST_LINES, "lines")


def folders(source: Source) -> list[str]:
    """A folder has few files of its own."""
    counts = Counter(str(PurePath(path).parent) for path in source.files)
    return [line for folder, n in sorted(counts.items()) for line in _over(folder, n, MOST_FILES, "files")]


def import_circles(source: Source) -> list[str]:
    """No module imports itself by way of others, lazy imports counted."""
    return [f"circle: {', '.join(group)}" for group in circles(source.edges)]


def floors(source: Source) -> list[str]:
    """A package's direct members stand on few floors."""
    return [line for f, most in MOST_FLOORS.items() for line in _over(f, source.floors(f), most, "floors")]


def one_class_a_name(source: Source) -> list[str]:
    """A name of a public class says one thing in the whole house."""
    where: dict[str, list[str]] = {}
    for path in source.production:
        for node in source.nodes[module_of(path)]:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_":
                where.setdefault(node.name, []).append(path)
    return [f"{name}: {', '.join(sorted(paths))}" for name, paths in sorted(where.items()) if len(paths) > 1]


def function_sizes(source: Source) -> list[str]:
    """Functions are short and take few parameters; compiled kernels, which cannot be cut up, are left out."""
    out = []
    for path, text in source.production.items():
        if re.search(r"^@jit|\bjit\b.*import|import.*\bjit\b", text, re.MULTILINE):
            continue
        for function in (n for n in source.nodes[module_of(path)] if isinstance(n, Function)):
            where = f"{path}:{function.lineno} {function.name}"
            out += _over(where, (function.end_lineno or 0) - function.lineno + 1, MOST_FUNCTION_LINES, "lines")
            out += _over(where, _parameters(function.args), MOST_PARAMETERS, "parameters")
    return out


def type_ignores(source: Source) -> list[str]:
    """Few lines are kept from the type checker."""
    count = sum(text.count("# type: ignore") for text in source.production.values())
    return _over("production", count, MOST_TYPE_IGNORES, "type ignores")


def any_parameters(source: Source) -> list[str]:
    """What commands and studies are given has a type."""
    out = []
    for path in (p for p in source.production if p.startswith(("piper_sim/app/", "piper_sim/study/"))):
        for function in (n for n in source.nodes[module_of(path)] if isinstance(n, Function)):
            a = function.args
            given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]
            untyped = [g.arg for g in given if isinstance(g.annotation, ast.Name) and g.annotation.id == "Any"]
            out += [f"{path}:{function.lineno} {function.name}: {name} is Any" for name in untyped]
    return out


def dependencies(source: Source) -> list[str]:
    """What the project file asks for is imported: by production, or by tests if it is asked for their sake."""
    project = tomllib.loads(source.project)["project"]
    extras = project.get("optional-dependencies", {})
    ours = {top for module in source.modules for top in _tops(source.nodes[module])}
    tests = {top for module in source.nodes for top in _tops(source.nodes[module])}
    asked = [(d, ours) for d in [*project.get("dependencies", []), *extras.get("exec", [])]]
    asked += [(d, tests | TOOLS) for d in extras.get("dev", [])]
    names = [(re.split(r"[\s<>=!~;\[]", requirement)[0], imported) for requirement, imported in asked]
    names = [(IMPORTED_AS.get(n, n), found) for n, found in names]
    return [f"{n} is asked for and never imported" for n, found in names if not {n, n.replace("-", "_")} & found]


def used_by_tests_alone(source: Source) -> list[str]:
    """Every public name of production is used by production, or is what a package gives to its users."""
    named = set(re.findall(r"\w+", " ".join(tomllib.loads(source.project)["project"].get("scripts", {}).values())))
    for module in source.modules:
        texts = (n.value for n in source.nodes[module] if isinstance(n, ast.Constant) and isinstance(n.value, str))
        named |= {word for t in texts if _IMPORTS.search(t) for word in re.findall(r"\w+", t)}
    return [
        f"{path}:{node.lineno} {name} is used by nothing in production"
        for module, path in source.modules.items()
        for name, node in _public(source.trees[module])
        if name not in named and not _loaded(source, module, name, node) and not _taken(source, module, name)
    ]


def raises_documented(source: Source) -> list[str]:
    """A public function that raises PiperError itself says so in its docstring."""
    out = []
    for module, path in source.modules.items():
        for function in public_functions(source.trees[module]):
            if _raises(function) and not re.search(r"\bRaises?\b", ast.get_docstring(function) or ""):
                out.append(f"{path}:{function.lineno} {function.name} raises PiperError and does not say when")
    return out


RULES: tuple[Rule, ...] = (
    production_lines,
    tests_lines,
    folders,
    import_circles,
    floors,
    one_class_a_name,
    function_sizes,
    type_ignores,
    any_parameters,
    dependencies,
    used_by_tests_alone,
    raises_documented,
)


def _over(where: str, count: int, most: int, unit: str) -> list[str]:
    return [f"{where}: {count:,} {unit}, at most {most:,}"] if count > most else []


def _parameters(args: ast.arguments) -> int:
    named = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len([n for n in named if n not in ("self", "cls")]) + bool(args.vararg) + bool(args.kwarg)


def _tops(nodes: Iterable[ast.AST]) -> set[str]:
    out = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            out |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            out.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and _word(node.func) in ("import_module", "importorskip"):
            out |= {str(a.value).split(".")[0] for a in node.args if isinstance(a, ast.Constant)}
    return out


def _public(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [] if any(_word(d) not in INERT for d in node.decorator_list) else [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        else:
            names = []
        yield from ((n, node) for n in names if n[0] != "_")


def _word(decorator: ast.expr) -> str:
    inner = decorator.func if isinstance(decorator, ast.Call) else decorator
    return inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")


def _loaded(source: Source, module: str, name: str, definition: ast.stmt) -> bool:
    """Whether a module uses its own name elsewhere than where it is defined."""
    inside = sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(definition))
    assigned = 0 if isinstance(definition, ast.FunctionDef | ast.ClassDef) else 1
    return source.words[module][name] > inside - assigned


def _taken(source: Source, module: str, name: str) -> bool:
    """Whether production takes the name from a module, or from a package that hands it on to others."""
    if source.modules[module].endswith("__init__.py") and "." not in module:
        return True
    for user in source.modules:
        names = source.imports[user].get(module, frozenset())
        if "*" in names and (
            source.words[user][f".{name}"] or (module.endswith(f".{name}") and source.words[user][name])
        ):
            return True
        package = source.modules[user].endswith("__init__.py")
        if name in names and (not package or source.words[user][name] or _taken(source, user, name)):
            return True
    return False


def _raises(function: ast.AST) -> bool:
    raised = (n.exc for n in ast.walk(function) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call))
    return any(_word(call) == "PiperError" for call in raised)


if __name__ == "__main__":
    house = Source.read(Path(__file__).parents[2])
    print(f"production: {house.lines(tests=False):,} lines of {MOST_PRODUCTION_LINES:,}")
    print(f"tests: {house.lines(tests=True):,} lines of {MOST_TEST_LINES:,}")
    print("floors:", ", ".join(f"{f} {house.floors(f)} of {most}" for f, most in MOST_FLOORS.items()))

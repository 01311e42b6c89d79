"""Values of arguments to facts and back: the words of the table's column `how`."""

import re
from collections.abc import Callable, Mapping
from functools import cache

from ir.workload.config.mixers import SIGNS

_OFF = ("false", "0", "no", "off", "none", "null", "", "disabled")
_NULL = (None, "null", "None", "~")
_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d{1,4}))?")
_TIMES = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")
INERT, PRESUMED, FILE = "inert", "as", "file"


def is_set(value: object) -> bool:
    """Whether an argument says anything: null says nothing."""
    return value not in _NULL


def read_value(how: str, value: object) -> object:
    """The fact that a value states, None where it states none.

    >>> read_value("int", "1_024"), read_value("is bf16", True), read_value("words adam=adamw", "adam")
    (1024, 'bf16', 'adamw')
    >>> read_value("class", "nemo.collections.llm.Llama3Config8B")
    'Llama3Config8B'
    >>> read_value("pattern", "([0]*3+[1])*2"), read_value("slots", "a:0,1@b:0")
    ([0, 0, 0, 1, 0, 0, 0, 1], [2, 1])

    Raises ValueError: it is no such value; the text says what would be.
    """
    kind, _, rest = how.partition(" ")
    if kind in ("int", "num", "nodes") and value in ("none", ""):
        return None
    if value == "auto" and kind in ("flag", "not", "is", "else", "flagword"):
        raise ValueError("true or false")
    if kind in _READ:
        return _READ[kind](value)
    match kind:
        case "is":
            return _constant(rest) if _on(value) else None
        case "else":
            return None if _on(value) else _constant(rest)
        case "flagword":
            return rest if str(value).lower() == "true" else "none" if not _on(value) else str(value).lower()
        case "words":
            return _word(rest, value)
    raise AssertionError(how)


def presumed(how: str, value: object) -> bool:
    """Whether a value of a row `as …` is what predictions presume anyway. `@pp` and its like: where it matters at all.

    >>> presumed("as true", True), presumed("as none", "local"), presumed("as 1", "1"), presumed("as @pp", [])
    (True, False, True, True)
    """
    words = [w for w in how.split()[1:] if w[0] != "@"]
    said = str(value).lower() if isinstance(value, bool) else str(value)
    if (parts := _list(value)) and {*parts} <= {*words}:  # a list of words, perhaps as Python writes it
        return True
    return said in words or (said.lower() in words) or (not _on(value) and (not words or any(w in _OFF for w in words)))


@cache
def _map(words: str) -> Mapping[str, object]:
    return {w: _constant(f) for w, _, f in (pair.partition("=") for pair in words.split())}


def _constant(text: str) -> object:
    return int(text) if text.isdigit() else text or None


def _word(words: str, value: object) -> object:
    known = _map(words)
    said = str(value).lower() if isinstance(value, bool) else str(value)
    for word in (said, said.lower()):
        if word in known:
            return known[word]
    raise ValueError("one of " + ", ".join(known))


def _on(value: object) -> bool:
    return bool(value) and str(value).lower() not in _OFF


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number")
    try:
        found = float(value)
    except ValueError:
        raise ValueError("a number") from None
    if not abs(found) < 1e15:
        raise ValueError("a number below 1e15")
    return found


def _whole(value: object) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError("a whole number")
    return int(number)


def _modules(value: object) -> list[int]:
    """Decoder layers of each stage, out of the names of its modules."""
    stages = value if isinstance(value, list) and value and all(isinstance(s, list) for s in value) else [[]]
    words = [" ".join(map(str, stage)) for stage in stages]
    found = [[int(m) for m in re.findall(r"\blayers\.(\d{1,6})(?= |$)", stage)] for stage in words]
    ordered = [i for stage in found for i in stage] == [*range(sum(map(len, found)))]
    if not (ordered and re.search("embed", words[0]) and re.search(r"lm_head|output", words[-1])):
        raise ValueError("a list of stages, each a list of modules: the embedding, layers in order, the head")
    return [*map(len, found)]


def _slots(value: object) -> list[int]:
    """How many devices of each host: `host:0,1@other:0`."""
    found = re.findall(r"[^@:]+:(\d+(?:,\d+)*)(?:@|$)", str(value))
    if len(found) != str(value).count("@") + 1:
        raise ValueError("a list of devices like localhost:0,1,2,3")
    return [len(x.split(",")) for x in found]


def _gres(value: object) -> int | None:
    """GPUs among a node's generic resources, None where there are others alone.

    >>> _gres("nvme:1,gpu:h100:8(S:0-1)"), _gres("gpu"), _gres("nvme:1")
    (8, 1, None)
    """
    words = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    found = re.findall(r"(?:^|,)(?:gres[:/])?gpu(?::[A-Za-z][^:,()]*)?(?::(\d+)|(?=[,(]|$))", words)
    if not found and "gpu" in words:
        raise ValueError("resources like gpu:8")
    return sum(int(n or 1) for n in found) or None


def _list(value: object) -> list[str]:
    if isinstance(value, list | tuple):
        return [str(v) for v in value]
    return re.findall(r"[\w.+-]+", str(value))


def _layout(value: object) -> str:
    """Megatron's layout string; nested lists of its words as one.

    >>> _layout([["embedding", "decoder"], ["decoder", "loss"]])
    'Et|tL'
    """
    if isinstance(value, list):
        words = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
        if not all(isinstance(s, list) and all(w in words for w in s) for s in value):
            raise ValueError("a list of stages, each a list of " + ", ".join(words))
        return "|".join("".join(words[w] for w in stage) for stage in value)
    return str(value)


def _attentions(value: object) -> str:
    """gpt-neox's kinds of attention, as the job's: `[[["flash"], "all"]]`.

    >>> _attentions([[["global"], 24]])
    'unfused'
    """
    kinds = {*re.findall(r"[A-Za-z]\w*", str(value))} - {"all"}
    if len(kinds) != 1 or not kinds <= {"flash", "global"}:
        raise ValueError("flash in all layers, or global in all")
    return "flash" if kinds == {"flash"} else "unfused"


def _kinds(value: object) -> str:
    """A sign for each layer, perhaps with `|` between stages and prediction modules behind `/`."""
    if not isinstance(value, str) or not set(value) <= {*SIGNS, "|", "/"}:
        raise ValueError("a sign for each layer: M a state space, * attention, - an MLP, E experts, | ends a stage")
    if len({*value.split("/")[1:]}) > 1:
        raise ValueError("prediction modules that are alike, behind /: Megatron takes no others")
    return value


def _pattern(value: object) -> object:
    """Which layers hold experts: every n-th, or a list of 0 and 1, perhaps as Python writes it."""
    if isinstance(value, list):
        value = "[" + ",".join(map(str, value)) + "]"
    text = re.sub(r"[\s'\"]", "", str(value))[:10_000]
    while m := _GROUP.search(text):  # `([1]*3+[0])*2`, as many times as it says
        text = text[: m.start()] + "+".join([m[1]] * min(int(m[2] or 1), 1000)) + text[m.end() :]
        if len(text) > 10**5:
            break
    if text.isdigit() and len(text) < 5:
        return int(text)
    parts = text.split("+")
    if len(parts) > 1000 or not all(_TIMES.fullmatch(p) for p in parts):
        raise ValueError("a number, or a list like [0]*3+[1]*58")
    pairs = (m for p in parts if (m := _TIMES.fullmatch(p)))
    return [int(c) for m in pairs for c in m[1].split(",") * int(m[2] or 1)][:10_000]


def _nodes(value: object) -> int:
    """torchrun's --nnodes: a number, or the least and the most that a run may have.

    >>> _nodes("4"), _nodes("4:4")
    (4, 4)
    """
    least, colon, most = str(value).partition(":")
    if colon and least != most:
        raise ValueError("one number of nodes: a run may have any between them")
    return _whole(least)


_READ: Mapping[str, Callable[[object], object]] = {
    "int": _whole,
    "num": _number,
    "flag": _on,
    "not": lambda v: not _on(v),
    "text": str,
    "class": lambda v: str(v).rpartition(".")[2],
    "last": lambda v: int(_number("".join(re.findall(r"(\d+)\D*$", str(v))))),
    "ones": lambda v: int(_number(v)) if v not in (1, "1") else None,
    "fp8list": lambda v: "fp8" if any(re.search("float8|fp8|mx", w) for w in _list(v)) else None,
    "layout": _layout,
    "list": _list,
    "pattern": _pattern,
    "layers": _kinds,
    "modules": _modules,
    "nodes": _nodes,
    "slots": _slots,
    "gres": _gres,
    "attentions": _attentions,
}


def write_value(how: str, fact: object) -> object:
    """The value that states a fact, None where this argument cannot: what `read_value` reads as the fact.

    >>> write_value("words adam=adamw", "adamw"), write_value("is bf16", "fp16"), write_value("not", True)
    ('adam', None, False)
    """
    kind, _, rest = how.partition(" ")
    match kind:
        case "flag" | "as":
            return bool(fact)
        case "not":
            return not fact
        case "is":
            return True if fact == _constant(rest) else None
        case "flagword":
            return True if fact == rest else None
        case "words":
            return next((w for w, f in _map(rest).items() if f == fact), None)
        case "int" | "num" | "text" | "list" | "ones" | "layout" | "layers":
            return fact
        case "modules" if isinstance(fact, list):
            embedding, layers, *ends = rest.split()
            names = iter(f"{layers}.{i}" for i in range(sum(fact)))
            stages = [[next(names) for _ in range(n)] for n in fact]
            return [[embedding, *stages[0]], *stages[1:-1], [*stages[-1], *ends]]
        case "fp8list":
            return ["quantize.linear.float8"] if fact == "fp8" else None
        case "pattern" if isinstance(fact, list):
            dense = fact.index(1) if 1 in fact else len(fact)
            plain = fact == [0] * dense + [1] * (len(fact) - dense)
            return f"([0]*{dense}+[1]*{len(fact) - dense})" if plain and dense else fact
        case "pattern":
            return fact
    return None

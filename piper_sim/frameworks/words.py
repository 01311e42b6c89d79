"""A shell script's variables, and what its words stand for."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from piper_sim.frameworks.statements import DEEP, INNER, NAME, NESTED
from piper_sim.frameworks.sums import ANSWER, MAYBE_SET, UNSET, changed, number

_REFERENCE = re.compile(
    rf"\$(?:\{{(?P<braced>{NAME}|\d+)(?P<all>\[[@*]\])?(?:(?P<empty>:?)(?P<op>[-=?+])(?P<default>{NESTED}*+))?\}}"
    rf"|(?P<plain>{NAME})|(?P<one>[0-9@*#?$!])|\{{(?P<odd>{NESTED}*+)\}})"
)
# "$@", and variables that by their names hold arguments: unset, they are none
_BAG = r"(?i:[A-Z_]*(?:ARGS|ARGUMENTS|OPTS?|OPTIONS|FLAGS|EXTRA|PARAMS)[A-Z_]*)"
_ARGUMENTS = re.compile(rf'"?\$(?:[@*]|\{{[@*][^{{}}]*\}}|\{{?(?P<bag>{_BAG})(?:\[[@*]\])?(?::?-)?\}}?)"?')
_PIECE = re.compile(rf"\$(?=\")|{INNER}|(?:[^\s\"'`\\$]|\$(?![('\"]))+", re.DOTALL)
_BRACES = re.compile(rf"((?>{INNER}|[^{{\"'`\\$]|\$(?!\{{))*?)\{{({NESTED}*+)\}}(.*)", re.DOTALL)
_PART = re.compile(rf"{INNER}|\{{{NESTED}*+\}}|.", re.DOTALL)
_RANGE = re.compile(r"(-?(?:0|[1-9]\d{0,5}))\.\.(-?(?:0|[1-9]\d{0,5}))")
_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}  # of `$'…'`
MOST_BRACES = 1000
_SUM = re.compile(rf"\$\(\(({DEEP}*+)\)\)")


@dataclass
class ShellJob:
    """A script, read. command: words of its launch; batch: of its #SBATCH lines; environment: as it is there;
    files: what it writes by itself (`cat <<EOF > ds.json`). lost: arguments behind a comment or an empty line that ends
    the launch; others: commands that train, too. arrays: variables that are some, and `@` where `set --` gave its
    words; integers: those that hold sums; locals: variables that end with a function, how deep it lies, and their value
    outside; called: whether we stand in one; shells: `(` that are open, how deep, and what they leave as it was; maybe:
    whether what is read may not run. found: the words of all commands; letters: of them, and of all variables' values.
    """

    command: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    batch: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    exports: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    arrays: set[str] = field(default_factory=set)
    maybe: bool = False
    called: bool = False
    integers: set[str] = field(default_factory=set)
    locals: list[tuple[int, str, str | None]] = field(default_factory=list)
    shells: list[tuple[int, tuple[dict[str, str], set[str], dict[str, str]]]] = field(default_factory=list)
    found: list[list[str]] = field(default_factory=list)
    others: int = 0
    letters: int = 0

    def value(self, word: str) -> str | None:
        """What one word as written stands for; None where the file does not say."""
        found = " ".join(expanded(self, word))
        return None if UNSET in found or MAYBE_SET in found else found


def substituted(job: ShellJob, text: str, depth: int = 0, whole: bool = True) -> str:
    """A text with its variables put in; what the file does not say becomes UNSET.

    whole: it is not split into words, which takes the quotes of defaults away.
    """

    def put(m: re.Match[str]) -> str:
        name, default = m["braced"] or m["plain"] or m["one"], m["default"]
        if name is None:
            none = m["odd"][:1] in ("@", "*") and "@" not in job.variables and not job.called
            return "" if none else ANSWER
        if name in ("@", "*"):
            return ANSWER if job.called else job.variables.get("@", "")
        value = _found(job, name, whole=m["all"] is not None)
        missing = value is None or value == UNSET or (m["empty"] and not value)
        doubt = value is not None and ANSWER in value and not value.strip(UNSET)
        doubt = doubt or (m["op"] == "+" and MAYBE_SET in (value or ""))
        if ((missing or doubt) and m["op"] in ("-", "=")) or (m["op"] == "+" and value is not None and not missing):
            bare = re.sub(r"([\"'])(.*?)\1", r"\2", default, flags=re.DOTALL)
            value = substituted(job, bare if whole else default, depth + 1, whole) if depth < 9 else UNSET
            value = marked(value) if doubt else value
            if m["op"] == "=":
                given = substituted(job, bare, depth + 1) if depth < 9 else UNSET
                job.variables[name] = marked(given) if doubt or job.maybe else given
            return value
        if m["op"] == "+":
            return ""
        if m["all"] and whole and value:  # one word, whose parts have quotes no longer
            return (job.variables.get("IFS", " ")[:1]).join(split_words(value))
        return UNSET if value is None else value

    text = re.sub(r"\$\((?!\()[^()]*\)|`[^`]*`", ANSWER, text)
    text = re.sub(r"\$\[([^][]*)\]", r"$((\1))", text)
    text = _REFERENCE.sub(put, text)[: 10**6]
    return _SUM.sub(lambda m: _sum(job, m[1]), text)


def marked(value: str) -> str:
    """A value that may be another."""
    return re.sub(r"\S+", rf"\g<0>{MAYBE_SET}", value.replace(MAYBE_SET, ""))


def _found(job: ShellJob, name: str, *, whole: bool) -> str | None:
    """A variable's value, of an array its first word unless it is asked for whole; `$1` and `$#` of what `set` gave."""
    if name in job.variables:
        value = job.variables[name]
        return value if whole or name not in job.arrays else next(iter(split_words(value)), "")
    given = split_words(job.variables.get("@", ""))
    if job.called and (name == "#" or name.isdigit()):  # its call's
        return ANSWER
    if name == "#" and "@" in job.variables and not any(UNSET in w for w in given):
        return str(len(given))
    if name in ("#", "?", "$", "!"):
        return ANSWER
    return given[int(name) - 1] if name.isdigit() and 0 < int(name) <= len(given) else None


def _sum(job: ShellJob, text: str) -> str:
    found = number(job.variables, text)
    job.variables.update(dict.fromkeys(changed(text), ANSWER))  # `$((N++))`
    return ANSWER if UNSET in found else found


def expanded(job: ShellJob, word: str, split: bool = True) -> list[str]:
    """One word as written to the words it stands for: only what is not quoted is split, and whole arrays.

    split: false for the value of an assignment, which stays one word.

    >>> job = ShellJob(variables={"A": "1 2"})
    >>> expanded(job, '--x="$A"'), expanded(job, "$A"), expanded(job, "'$A'"), expanded(job, '"${A[@]}"')
    (['--x=1 2'], ['1', '2'], ['$A'], ['1', '2'])
    """
    if split and (many := list(islice(braced(word), MOST_BRACES))) != [word]:
        return [x for one in many for x in expanded(job, one)] if len(many) < MOST_BRACES else [ANSWER]
    if bag := _ARGUMENTS.fullmatch(word[:99]):
        value = UNSET if job.called and not bag["bag"] else job.variables.get(bag["bag"] or "@", UNSET)
        if UNSET in value and not value.strip(UNSET + MAYBE_SET + " "):
            return [f"{UNSET}${bag['bag'] or '@'}"]
    out, empty = [""], True
    for m in _PIECE.finditer(word):
        piece, first = m[0], m[0][0]
        array = re.fullmatch(r'"?\$(?:\{(?:\w+\[@\]|@)\}|@)"?', piece)
        if first == '"' and not array:
            parts = (re.sub(r'\\(["\\`])', r"\1", part) for part in piece[1:-1].split(r"\$"))
            out[-1] += "$".join(substituted(job, part) for part in parts)
        elif first == "'" or first == "\\":
            out[-1] += piece[1:-1] if first == "'" else piece[1:].replace("\n", "")
        elif piece[:2] == "$'":
            out[-1] += re.sub(r"\\(.)", lambda m: _ESCAPED.get(m[1], ANSWER), piece[2:-1], flags=re.DOTALL)
        elif piece == "$" and word[m.end() : m.end() + 1] == '"':  # `$"…"`, which may be translated
            continue
        elif array or "$" in piece or first == "`":
            text = substituted(job, piece.strip('"'), whole=not (split or array))
            more = [text] if not (split or array) else split_words(text) if array else _fields(job, text)
            out[-1:] = [out[-1] + more[0], *more[1:]] if more else [out[-1]]
            empty = empty and not more
            continue
        else:
            out[-1] += piece
        empty = False
    return [] if empty else out


def _fields(job: ShellJob, text: str) -> tuple[str, ...]:
    """What is not quoted, split at what the script says in IFS."""
    ends = job.variables.get("IFS", " ")
    if UNSET in ends or (" " in ends and not ends.strip()):
        return split_words(text)
    return tuple(re.findall(rf"[^{re.escape(ends)}]+", text)) if ends else (text,)


def braced(word: str) -> Iterator[str]:
    """The words that one with braces stands for, as written.

    >>> list(braced("a{1..3}{x,y}")), list(braced("${N}-'{1,2}'"))
    (['a1x', 'a1y', 'a2x', 'a2y', 'a3x', 'a3y'], ["${N}-'{1,2}'"])
    """
    m = _BRACES.match(word) if word.count("{") < 20 else None
    if m is None or not m[2]:
        yield word
        return
    rest = word[m.end(2) + 1 :]
    parts = [""]
    for x in _PART.findall(m[2]):
        parts = [*parts, ""] if x == "," else [*parts[:-1], parts[-1] + x]
    if run := _RANGE.fullmatch(m[2]):
        first, last = int(run[1]), int(run[2])
        step = 1 if first <= last else -1
        parts = [str(n) for n in range(first, last + step, step)][:MOST_BRACES]
    elif len(parts) < 2:  # of other ranges, `{01..08..2}` or `{a..d}`, nothing is made
        yield from ((f"{m[1]}{ANSWER}" if ".." in m[2] else f"{m[1]}{{{m[2]}}}") + x for x in braced(rest))
        return
    yield from (x for part in parts for x in braced(f"{m[1]}{part}{rest}"))


@lru_cache(maxsize=64)  # arrays that each command of a script reads
def split_words(text: str) -> tuple[str, ...]:
    """Words by blanks and quotes, by blanks alone where a quote is not closed."""
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return tuple(text.split())

"""A shell script to the words of the command that it starts. Words are expanded, nothing is run."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from ir.core.files import FileErrors
from piper_sim.frameworks.branches import MAYBE, NO, ShellJobBranches
from piper_sim.frameworks.statements import DEEP, INNER, NAME, NESTED, statements

MOST_WORDS = 20_000
UNSET = "\u2e2e"  # stands where a variable's value is not in the file
MAYBE_SET = "\u2e2f"  # behind each word of a value that a branch gave which may not be taken
_ASSIGN = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(
    rf"\$(?:\{{(?P<braced>{NAME}|\d+)(?:\[[@*]\])?(?:(?P<empty>:?)(?P<op>[-=?+])(?P<default>{NESTED}*+))?\}}"
    rf"|(?P<plain>{NAME})|(?P<one>[0-9@*#?$!])|\{{(?P<odd>{NESTED}*+)\}})"
)
_LIST = rf"{NAME}\+?=\((?:{INNER}|[^()\"'`\\])*+\)"
_WORD = re.compile(rf"{_LIST}|;+|&&|\|\|?|(?:{INNER}|(?!&&)[^\s\"'`\\;|])+", re.DOTALL)
# "$@", and variables that by their names hold arguments: unset, they are none
_BAG = r"(?i:[A-Z_]*(?:ARGS|ARGUMENTS|OPTS?|OPTIONS|FLAGS|EXTRA|PARAMS)[A-Z_]*)"
_ARGUMENTS = re.compile(rf'"?\$(?:[@*]|\{{[@*][^{{}}]*\}}|\{{?(?P<bag>{_BAG})(?:\[[@*]\])?\}}?)"?')
_PIECE = re.compile(rf"{INNER}|(?:[^\s\"'`\\$]|\$(?!\())+", re.DOTALL)
_ENDS = {";", ";;", "&&", "||", "|", "&", "(", ")"}
_REDIRECTION = re.compile(r"\d?&?[<>]")
_SUM = re.compile(rf"\$\(\(({DEEP}*+)\)\)")
_SET = re.compile(rf"({NAME})\s*(?:([-+*/%]?)=(?!=)\s*(.+)|([-+])\4)")  # in `((…))` and `let`
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_SLURM: dict[str, tuple[str, ...]] = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
}
_SLURM |= {"--gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), "--ntasks": ("SLURM_NTASKS",)}
_SAID = [[x] for x in ("echo", "cat", "printf", "[", "[[", "test")]
_TRAINS = re.compile(r"(?:train|finetune|sft|pretrain)\w*\.py$|^torchtitan\.")
_SKIP = {"if", "for", "while", "case", "until", "fi", "done", "esac", "then", "else", "elif", "do", "{", "}"}
_SKIP |= {"eval", "exec", "time", "nohup", "sudo", "env"}


@dataclass
class ShellJob:
    """A script, read. command: words of its launch; batch: of its #SBATCH lines; exports: variables as they ended;
    files: what it writes by itself (`cat <<EOF > ds.json`). lost: arguments behind a comment or an empty line that ends
    the launch; others: commands that train, too. letters: of all variables' values.
    """

    command: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    batch: list[str] = field(default_factory=list)
    exports: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    others: int = 0
    letters: int = 0

    def value(self, word: str) -> str | None:
        """What one word as written stands for; None where the file does not say."""
        found = " ".join(_expanded(self, word))
        return None if UNSET in found or MAYBE_SET in found else found


def read_shell(text: str, form: FileErrors, file: str) -> ShellJob:
    """The launch of a script, or of a bare list of arguments.

    >>> from ir.core.errors import ErrorKind
    >>> form = FileErrors("a launch", ErrorKind.JOB, "FILE")
    >>> read_shell('A=(--tp 2)\\ntorchrun x.py \\\\\\n "${A[@]}" --lr=${LR:-3}', form, "x.sh").command
    ['torchrun', 'x.py', '--tp', '2', '--lr=3']

    Raises PiperError (job): a quote that is not closed, more words than a launch has.
    """
    job, commands, count = ShellJob(), list[list[str]](), 0
    branches = ShellJobBranches(job.value, job.variables.__contains__)
    for statement in statements(text):
        if statement.line.startswith("#SBATCH"):
            job.batch += _split(statement.line[7:], form, file)
            for name, value in options(job.batch):
                job.variables.update(dict.fromkeys(_SLURM.get(name, ()), str(value)))
            continue
        words, joined = _split(statement.line, form, file), ";"
        _check_length(len(words), form, file)
        while words:
            ends = _ENDS - {")"} if branches.patterns else _ENDS
            end = next((i for i, w in enumerate(words) if w in ends), len(words))
            here, runs = branches.step(words[:end], joined)
            joined = words[end] if end < len(words) else ";"
            words = words[end + 1 :]
            if runs is not NO and (command := _command(job, here, (form, file), runs is MAYBE)):
                commands.append(command)
                count += len(command)
            if runs is not NO and statement.target:
                body = statement.body if statement.literal else _text(job, statement.body)
                job.files[_text(job, statement.target)] = body.replace(MAYBE_SET, "")
            if joined == ";;":
                branches.arm_ends()
        _check_length(count + job.letters / 4, form, file)
    found = [_unwrapped(job, words) for words in commands]
    job.command = max(found, key=_looks, default=[])
    job.others = len({tuple(x) for x in found if all(_looks(x)[:3])} - {tuple(job.command)})
    behind = found[found.index(job.command) + 1 :] if found else []
    for words in takewhile(lambda words: words[0].startswith("-"), behind):
        (job.command if job.command[0].startswith("-") else job.lost).extend(words)
    return job


def _check_length(words: float, form: FileErrors, file: str) -> None:
    if words > MOST_WORDS:
        raise form.wrong("this is not a launch: too long", file, None, f"up to {MOST_WORDS:,} words")


def _command(job: ShellJob, words: list[str], source: tuple[FileErrors, str], maybe: bool) -> list[str]:
    """One command's words, expanded; assignments before it are kept in mind. maybe: whether it may not run."""
    while words and words[0] in _SKIP:
        words = words[1:]
    if words and words[-1][-1:] == ")" and "(" not in words[-1]:  # of `(cd x; …)`
        words = [*words[:-1], words[-1][:-1]]
    if words and re.match(r"\([^(]", words[0]):
        words = [words[0][1:], *words[1:]]
    exported = bool(words) and words[0] in _DECLARES
    while words and (words[0] in _DECLARES or (exported and words[0].startswith("-"))):
        words = words[1:]
    if words and (words[0].startswith("((") or words[0] == "let"):
        sums = words[1:] if words[0] == "let" else [" ".join(words)[2:].removesuffix("))")]
        found = filter(None, (_SET.fullmatch(x.strip("\"' ")) for x in sums))
        words = [f"{m[1]}=$(({m[1] + op if (op := m[2] or m[4]) else ''}({m[3] or 1})))" for m in found]
    while words and (m := _ASSIGN.fullmatch(words[0])):
        array = _split(m[3][1:-1], *source) if m[3].startswith("(") and m[3].endswith(")") else None
        _assign(job, m, array, exported or len(words) > 1, maybe)
        words = words[1:]
    # Neither `2>&1` nor `> log` is an argument.
    away = {i for i, w in enumerate(words) if _REDIRECTION.match(w)}
    away |= {i + 1 for i in away if words[i].endswith((">", "<"))}
    return [w for i, word in enumerate(words) if i not in away for w in _expanded(job, word)]


def _split(line: str, form: FileErrors, file: str) -> list[str]:
    """Words with their quotes, so that expansion knows what not to split; `;` and `&&` are words of their own."""
    words, at = list[str](), 0
    for m in _WORD.finditer(line):
        if line[at : m.start()].strip():
            break
        at = m.end()
        if m[0].startswith("#"):
            return words
        words.append(m[0])
    if line[at:].strip():
        raise form.wrong("a quote is not closed", file, None, "a shell script", "close the quote")
    return words


def _assign(job: ShellJob, m: re.Match[str], array: Sequence[str] | None, exported: bool, maybe: bool) -> None:
    """One NAME=value. array: its words, where it is one. maybe: whether it may not be set."""
    words = [w for word in ([m[3]] if array is None else array) for w in _expanded(job, word, array is not None)]
    value = " ".join(words if array is None else map(shlex.quote, words))
    old = job.variables.get(m[1], "")
    if maybe and UNSET in value and old and UNSET not in old and not m[2]:  # `--tp) TP=$2`: as if it were not asked for
        value = re.sub(r"\S+", rf"\g<0>{MAYBE_SET}", old.replace(MAYBE_SET, ""))
    elif maybe:  # what stood there before stands there in any case
        same = old if old and not m[2] and value.startswith(old) else ""
        value = same + re.sub(r"\S+", rf"\g<0>{MAYBE_SET}", value[len(same) :].replace(MAYBE_SET, ""))
    between = " " if array is not None and old else ""
    job.variables[m[1]] = f"{old}{between}{value}" if m[2] else value
    job.letters += len(job.variables[m[1]]) - len(old)
    if exported or m[1] in job.exports:
        job.exports[m[1]] = job.variables[m[1]]


def _text(job: ShellJob, text: str, depth: int = 0, whole: bool = True) -> str:
    """A text with its variables put in; what the file does not say becomes UNSET.

    whole: it is not split into words, which takes the quotes of defaults away.
    """

    def put(m: re.Match[str]) -> str:
        name = m["braced"] or m["plain"]
        if m["odd"] is not None:
            return "" if m["odd"][:1] in ("@", "*") else UNSET
        if m["one"] or name is None:
            return "" if m["one"] in ("@", "*") else UNSET
        value, default = job.variables.get(name), m["default"]
        missing = value in (None, UNSET) or (m["empty"] and not value)
        if (missing and m["op"] in ("-", "=")) or (m["op"] == "+" and value is not None and not missing):
            bare = re.sub(r"([\"'])(.*?)\1", r"\2", default, flags=re.DOTALL)
            value = _text(job, bare if whole else default, depth + 1, whole) if depth < 9 else UNSET
            if m["op"] == "=":
                job.variables[name] = _text(job, bare, depth + 1) if depth < 9 else UNSET
            return value
        if m["op"] == "+":
            return ""
        return UNSET if value is None else value

    text = re.sub(r"\$\((?!\()[^()]*\)|`[^`]*`", UNSET, text)
    text = _REFERENCE.sub(put, text)[: 10**6]
    return _SUM.sub(lambda m: _number(job, m[1]), text)


def _number(job: ShellJob, text: str) -> str:
    """A sum of whole numbers, as `$((…))` has it: products, sums and parentheses alone.

    >>> _number(ShellJob(variables={"T": "2"}), "8*T*3/4/(1+T)+1")
    '5'
    """
    text = re.sub(NAME, lambda m: job.variables.get(m[0], UNSET), text).replace(" ", "")
    if MAYBE_SET in text:
        return _number(job, text.replace(MAYBE_SET, "")) + MAYBE_SET
    while (m := re.search(r"\(([^()]*)\)", text)) and UNSET not in text:
        text = f"{text[: m.start()]}{_number(job, m[1])}{text[m.end() :]}"
    if not re.fullmatch(r"\d{1,9}([-+*/%]\d{1,9}){0,9}", text):
        return UNSET
    total, sign = 0, 1
    for plus, product in re.findall(r"([-+]?)([^-+]+)", text):
        first, *rest = re.split(r"([*/%])", product)
        value, sign = int(first), -1 if plus == "-" else 1
        for op, word in zip(rest[::2], rest[1::2], strict=True):
            if op != "*" and not int(word):
                return UNSET
            value = value * int(word) if op == "*" else value // int(word) if op == "/" else value % int(word)
        total += sign * value
    return str(total)


def _expanded(job: ShellJob, word: str, split: bool = True) -> list[str]:
    """One word as written to the words it stands for: only what is not quoted is split, and whole arrays.

    split: false for the value of an assignment, which stays one word.

    >>> job = ShellJob(variables={"A": "1 2"})
    >>> _expanded(job, '--x="$A"'), _expanded(job, "$A"), _expanded(job, "'$A'"), _expanded(job, '"${A[@]}"')
    (['--x=1 2'], ['1', '2'], ['$A'], ['1', '2'])
    """
    if (bag := _ARGUMENTS.fullmatch(word[:99])) and (
        bag["bag"] is None or job.variables.get(bag["bag"], UNSET) == UNSET
    ):
        return [f"{UNSET}${bag['bag'] or '@'}"]
    out, empty = [""], True
    for m in _PIECE.finditer(word):
        piece, first = m[0], m[0][0]
        array = re.fullmatch(r'"?\$\{\w+\[@\]\}"?', piece)
        if first == '"' and not array:
            parts = (re.sub(r'\\(["\\`])', r"\1", part) for part in piece[1:-1].split(r"\$"))
            out[-1] += "$".join(_text(job, part) for part in parts)
        elif first == "'" or first == "\\":
            out[-1] += piece[1:-1] if first == "'" else piece[1:].replace("\n", "")
        elif array or "$" in piece or first == "`":
            text = _text(job, piece.strip('"'), whole=not (split or array))
            more = _words(text) if split or array else [text]
            out[-1:] = [out[-1] + more[0], *more[1:]] if more else [out[-1]]
            empty = empty and not more
            continue
        else:
            out[-1] += piece
        empty = False
    return [] if empty else out


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _unwrapped(job: ShellJob, words: list[str]) -> list[str]:
    """`bash -c "…"`, which knows what is exported, and words that hold a whole command, split."""
    known = {k: v for k, v in job.variables.items() if k in job.exports or k.startswith("SLURM_")}
    out: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if " " in word and before in ("-c", "-lc"):
            out += _words(_text(ShellJob(variables=known), word))
        else:
            out += _words(word) if " " in word and re.search(r"(^|\s)--?\w", word) else [word]
    return out


def _looks(words: Sequence[str]) -> tuple[bool, bool, bool, int]:
    """How much a command looks like the launch: its options count, what starts them, and that it trains."""
    count = sum(w.startswith("--") for w in words)
    options = words[:1] not in _SAID and count > 0
    return options, options and any(map(_TRAINS.search, words)), not words[0].startswith("-"), count


def options(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """(option, value) of command line words: true for a flag, a list for several; what is no option under "".

    >>> list(options(["x", "--tp=2", "--split", "9", "-1", "--bf16"]))
    [('', 'x'), ('--tp', '2'), ('--split', ['9', '-1']), ('--bf16', True)]
    """
    name, values = "", list[str]()
    for word in (*words, "--"):
        if re.match(r"--.|-[A-Za-z]|--$", word):
            if name:
                yield name, values[0] if len(values) == 1 else values or True
            name, eq, value = word.partition("=")
            values = [value] if eq else []
        elif name and not word.startswith(f"{UNSET}$"):
            values.append(word)
        else:
            yield "", word


def environment(job: ShellJob) -> Mapping[str, str]:
    """Exported variables whose names are in capitals, those that only carry arguments left out."""
    return {k: v.replace(MAYBE_SET, "") for k, v in job.exports.items() if k.isupper() and "--" not in v}

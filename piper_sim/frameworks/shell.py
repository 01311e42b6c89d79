"""A shell script to the words of the command that it starts. Words are expanded, nothing is run."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from ir.core.errors import PiperError
from piper_sim.frameworks.branches import MAYBE, NO, YES, ShellJobBranches
from piper_sim.frameworks.statements import INNER, NAME, ShellJobStatement, statements
from piper_sim.frameworks.sums import ANSWER, MAYBE_SET, UNSET, number, settings
from piper_sim.frameworks.table import FORM
from piper_sim.frameworks.words import ShellJob, expanded, marked, split_words, substituted

MOST_WORDS = 20_000
_ASSIGN = re.compile(rf"({NAME})(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_LIST = rf"{NAME}\+?=\((?:{INNER}|[^()\"'`\\])*+\)"
_WORD = re.compile(rf"{_LIST}|;+|&&|\|\|?|(?:{INNER}|(?!&&)[^\s\"'`\\;|])+", re.DOTALL)
_ENDS = {";", ";;", "&&", "||", "|", "&", "(", ")"}
_COMMAND = re.compile(r"^--?[A-Za-z][\w.-]*\s|\s--?[A-Za-z]")  # in one word, where one has quoted too much
_REDIRECTION = re.compile(r"\d?&?[<>]")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_SLURM: dict[str, tuple[str, ...]] = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
}
_SLURM |= {"--gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), "--ntasks": ("SLURM_NTASKS",)}
_SAID = [[x] for x in ("echo", "cat", "printf", "[", "[[", "test", ":")]
_TRAINS = re.compile(r"(?:train|finetune|sft|pretrain)\w*\.py$|^torchtitan\.")
_ATTACHED = re.compile(r"^(-[A-Za-z])(\d+)$")
_LAUNCHERS = re.compile(r"torchrun|srun|sbatch|salloc|mpirun|mpiexec|deepspeed|accelerate|bash|sh|python[\d.]*")
_WRAPPERS = {"docker", "podman", "singularity", "apptainer", "enroot", "kubectl", "ssh", "bsub", "ray", "nice", "nsys"}
_WRAPPERS |= {"ncu", "timeout", "numactl", "taskset", "stdbuf"}
_SKIP = {"if", "for", "while", "case", "until", "fi", "done", "esac", "then", "else", "elif", "do", "{", "}"}
_SKIP |= {"eval", "exec", "time", "nohup", "sudo", "env"}


def read_shell(text: str) -> ShellJob:
    """The launch of a script, or of a bare list of arguments.

    >>> read_shell('A=(--tp 2)\\ntorchrun x.py \\\\\\n "${A[@]}" --lr=${LR:-3}').command
    ['torchrun', 'x.py', '--tp', '2', '--lr=3']

    Raises PiperError (job): a quote that is not closed, more words than a launch has.
    """
    job, lines = ShellJob(), list(statements(text))
    named = {w for x in lines for w in re.findall(r"(?<![\w:.-])(?<!function )[\w:.-]++(?! ?\(\))", x.line)}
    branches = ShellJobBranches(job.value, job.variables.__contains__, named.__contains__)
    for statement in lines:
        if statement.line.startswith("#SBATCH"):
            job.batch += _split(statement.line[7:])
            for name, value in options(job.batch):
                job.variables.update(dict.fromkeys(_SLURM.get(name, ()), str(value)))
            continue
        words = _split(statement.line)
        _check_length(len(words))
        if _followed(job, branches, words, statement):
            break
        _check_length(job.letters / 4)
    job.others = len({tuple(x) for x in job.found if all(_looks(x)[:3])} - {tuple(job.command)})
    behind = job.found[job.found.index(job.command) + 1 :] if job.found else []
    for words in takewhile(lambda words: words[0].startswith("-"), behind):
        (job.command if job.command[0].startswith("-") else job.lost).extend(words)
    return job


def _followed(job: ShellJob, branches: ShellJobBranches, words: list[str], whole: ShellJobStatement) -> bool:
    """Follow the commands of one statement. Returns whether the script ends there, behind its launch."""
    joined = ";"
    while words:
        begins = joined == "("
        ends = _ENDS - {")"} if branches.patterns else _ENDS
        end = next((i for i, w in enumerate(words) if w in ends), len(words))
        here, runs = branches.step(words[:end], joined)
        job.called = branches.inside
        while job.locals and job.locals[-1][0] > branches.groups:  # their function has ended
            _, name, value = job.locals.pop()
            job.variables[name] = UNSET if value is None else value
        if here[:1] == ["local"]:
            names = (m[0] for w in here[1:] if (m := re.match(NAME, w)))
            job.locals += [(branches.groups, name, job.variables.get(name)) for name in names]
        joined = words[end] if end < len(words) else ";"
        words = words[end + 1 :]
        if begins or (here and here[0][0] == "(" and here[0][:2] != "(("):  # whose variables end with it
            job.shells.append((len(branches.blocks), (job.variables.copy(), job.arrays.copy(), job.exports.copy())))
        job.maybe = runs is MAYBE
        command, own = _command(job, here) if runs is not NO else ([], {})
        if command:
            job.found.append(_unwrapped(job, command, own))
            job.letters += len(command) * 4
            if not job.command or _looks(job.found[-1]) > _looks(job.command):
                job.command, job.environment = job.found[-1], job.exports | own
        if runs is not NO and whole.target:
            body = whole.body if whole.literal else substituted(job, whole.body)
            job.files[substituted(job, whole.target)] = body.replace(MAYBE_SET, "")
        ended = joined == ")" or (here and here[-1][-1] == ")" and "(" not in here[-1][1:])
        if ended and job.shells and job.shells[-1][0] == len(branches.blocks):
            job.variables, job.arrays, job.exports = job.shells.pop()[1]
        if joined == ";;":
            branches.arm_ends()
        if runs is YES and command[:1] == ["exit"] and _looks(job.command)[0] and not branches.groups:
            return True
    return False


def _check_length(words: float) -> None:
    if words > MOST_WORDS:
        raise FORM.wrong("this is not a launch: too long", None, None, f"up to {MOST_WORDS:,} words")


def _command(job: ShellJob, words: list[str]) -> tuple[list[str], dict[str, str]]:
    """One command's words, expanded, and the variables that stand before it; what it sets is kept in mind."""
    unsaid, read_twice = _unsaid(job, words), False
    while words and words[0] in _SKIP:
        read_twice, words = read_twice or words[0] == "eval", words[1:]
    if words and (words[0].startswith("((") or words[0] == "let"):
        sums = words[1:] if words[0] == "let" else [" ".join(words)[2:].removesuffix("))")]
        words = [x for one in sums for x in settings(one.strip("\"' "))]
    if words and re.match(r"\([^(]", words[0]):  # of `(cd x; …)`
        words = [words[0][1:], *words[1:]]
    if words and words[-1][-1:] == ")" and "(" not in words[-1]:
        words = [*words[:-1], words[-1][:-1]]
    exported, flags = bool(words) and words[0] in _DECLARES, ""
    while words and (words[0] in _DECLARES or (exported and words[0].startswith("-"))):
        flags, words = flags + words[0] * words[0].startswith("-"), words[1:]
    job.integers |= {m[0] for w in words if "i" in flags and (m := re.match(NAME, w))}
    sets = list(takewhile(bool, map(_ASSIGN.fullmatch, words)))
    words = words[len(sets) :]
    found, own = _read_twice(job, _text(job, words)) if read_twice else _arguments(job, words), {}
    for m in filter(None, (*sets, *map(_ASSIGN.fullmatch, unsaid))):
        if words and UNSET not in m[4]:  # `A=1 run $A`, which knows no such A
            own[m[1]] = " ".join(_value(job, m)[0])
        else:
            _assign(job, m, exported)
    return [] if _given(job, found) else found, own


def _arguments(job: ShellJob, words: Sequence[str]) -> list[str]:
    """Words expanded, without `2>&1` and `> log`."""
    away = {i for i, w in enumerate(words) if _REDIRECTION.match(w)}
    away |= {i + 1 for i in away if words[i].endswith((">", "<", ">&"))}
    return [w for i, word in enumerate(words) if i not in away for w in expanded(job, word)]


def _text(job: ShellJob, words: Sequence[str]) -> str:
    """What `eval` reads: its words, of which those that are not quoted are one line."""
    found = ((w, x) for w in words for x in expanded(job, w, split=False))
    return " ".join(x if w[0] in "\"'" else x.replace("\n", " ") for w, x in found)


def _read_twice(job: ShellJob, text: str) -> list[str]:
    """A text that a shell reads as commands, expanded again: words of the command with most options."""
    commands = [[""]]
    try:
        for word in (w for x in statements(text) for w in (*_split(x.line), ";")):
            commands = [*commands, []] if word in _ENDS else [*commands[:-1], [*commands[-1], word]]
    except PiperError:
        return list(split_words(text))
    return _arguments(job, max(commands, key=lambda c: sum(w.startswith("--") for w in c)))


def _unsaid(job: ShellJob, words: Sequence[str]) -> list[str]:
    """What a command sets in a way that is not followed, and what it takes away, as assignments."""
    value, names = ANSWER, list[str]()
    match words[next((i for i, w in enumerate(words) if not _ASSIGN.fullmatch(w)), len(words)) :]:
        case ["printf", "-v", name, *_]:
            names = [name]
        case ["read" | "mapfile" | "readarray" | "getopts", *more]:
            names = [w for w in more if re.fullmatch(NAME, w)]
        case ["unset", *more]:
            value, names = UNSET, [m[0] for w in more if (m := re.match(NAME, w.strip("\"'")))]
        case ["eval", first, *more] if not _ASSIGN.fullmatch(first):
            text = " ".join(x for w in (first, *more) for x in expanded(job, w))
            names = [] if "--" in text else re.findall(rf"(?:^|[\s;])({NAME})\+?=", text)
    return [f"{name}={value}" for name in names]


def _given(job: ShellJob, words: Sequence[str]) -> bool:
    """Whether it is the shell's `set` or `shift`; the words that it leaves are kept as `@`."""
    old = split_words(job.variables.get("@", ""))
    if job.called:  # a function's own words
        return words[:1] in (["set"], ["shift"])
    match words:
        case ["set", "--", *more]:
            left = tuple(more)
        case ["shift", *more] if old:
            left = old[int(more[0]) if more and more[0].isdigit() else 1 :]
        case ["set" | "shift", *_]:
            return True
        case _:
            return False
    job.variables["@"] = " ".join(shlex.quote(w) for w in left) if not job.maybe else UNSET
    job.letters += len(job.variables["@"])
    return True


def _split(line: str) -> list[str]:
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
        raise FORM.wrong("a quote is not closed", None, None, "a shell script", "close the quote")
    return words


def _value(job: ShellJob, m: re.Match[str]) -> tuple[list[str], bool]:
    """The words that an assignment gives, and whether they are an array's."""
    array = _split(m[4][1:-1]) if m[4].startswith("(") and m[4].endswith(")") else None
    if m[2] or any(re.match(r"\[[^]]*\]\+?=", w) for w in array or ()):  # words by number or by name
        return [ANSWER], True
    given = [m[4]] if array is None else array
    return [w for word in given for w in expanded(job, word, array is not None)], array is not None


def _assign(job: ShellJob, m: re.Match[str], exported: bool) -> None:
    """One NAME=value."""
    words, array = _value(job, m)
    name, more = m[1], m[3] and not m[2]
    value = " ".join(map(shlex.quote, words) if array and words != [ANSWER] else words)
    old = job.variables.get(name, "")
    if name in job.integers and not array:
        value, more = number(job.variables, f"{old or 0}+({value or 0})" if more else value or "0"), False
    if job.maybe and UNSET in value and old and UNSET not in old and not more:  # `--tp) TP=$2`: as if nobody asked
        value = marked(old)
    elif job.maybe and not (value.strip() or more) and (old or "$" in m[4]):  # or what stood there, or will
        value = f"{UNSET}${name}"
    elif job.maybe:  # what stood there before stands there in any case
        same = old if old and not more and value.startswith(old) and not value.startswith(old + MAYBE_SET) else ""
        value = same + marked(value[len(same) :])
    job.variables[name] = f"{old}{' ' if array and old else ''}{value}" if more else value
    if array:
        job.arrays.add(name)
    elif not more:
        job.arrays.discard(name)
    job.letters += len(job.variables[name]) - len(old)
    if exported or name in job.exports:
        job.exports[name] = job.variables[name]


def _unwrapped(job: ShellJob, words: list[str], own: dict[str, str], depth: int = 0) -> list[str]:
    """`bash -c "…"`, which knows what is exported, and words that hold a whole command, split. depth: of one in one."""
    known = {k: v for k, v in job.variables.items() if k in job.exports or k.startswith("SLURM_")} | own
    out: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if " " in word and before in ("-c", "-lc") and depth < 3:
            out += _unwrapped(job, _read_twice(ShellJob(variables=known), word), own, depth + 1)
        else:
            out += split_words(word) if " " in word and _COMMAND.search(word) else [word]
    return out


def _looks(words: Sequence[str]) -> tuple[bool, bool, bool, int]:
    """How much a command looks like the launch: its options count, what starts them, and that it trains."""
    count = sum(w.startswith("--") for w in words)
    options = words[:1] not in _SAID and count > 0
    return options, options and any(map(_TRAINS.search, words)), not words[0].startswith("-"), count


def options(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """(option, value) of command line words: true for a flag, a list for several; what is no option under "".

    >>> list(options(["x", "--tp=2", "--split", "9", "-1", "-N4", "--bf16"]))
    [('', 'x'), ('--tp', '2'), ('--split', ['9', '-1']), ('-N', '4'), ('--bf16', True)]
    """
    name, values = "", list[str]()
    for word in (*words, "--"):
        if re.match(r"--.|-[A-Za-z]|--$", word):
            if name:
                yield name, values[0] if len(values) == 1 else values or True
            name, eq, value = _ATTACHED.sub(r"\1=\2", word).partition("=")
            values = [value] if eq else []
        elif name and not word.startswith(f"{UNSET}$"):
            values.append(word)
        else:
            yield "", word


def started(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Words before the program, by whose they are: a launcher's, or those of a command that only starts one.

    >>> list(started("nice -n 9 srun -n 4 docker run -n a torchrun --nnodes 2".split()))[1:3]
    [('wrapper', ['nice', '-n', '9']), ('launcher', ['srun', '-n', '4'])]
    >>> list(started("mpirun -np 16 -N 8 python".split()))[0][1][3]
    '--npernode'
    """
    place, part, by = "launcher", list[str](), ""
    for word in words:
        name = word.replace(MAYBE_SET, "").rpartition("/")[2]
        by = name if _LAUNCHERS.fullmatch(name) else by
        found = "wrapper" if name in _WRAPPERS else "launcher" if by == name else place
        if found != place:
            yield place, part
            place, part = found, []
        part.append("--npernode" if word == "-N" and by in ("mpirun", "mpiexec") else word)
    yield place, part


def environment(job: ShellJob) -> Mapping[str, str]:
    """Exported variables whose names are in capitals, those that only carry arguments left out."""
    return {k: v.replace(MAYBE_SET, "") for k, v in job.environment.items() if k.isupper() and "--" not in v}

"""A shell script cut into statements: where its quotes, lists, comments and here-documents end. Nothing is expanded."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

NAME = r"[A-Za-z_]\w*"
DEEP = r"[^()]"  # a character, or what stands in parentheses
for _ in range(4):  # as deep as regular expressions are told to look
    DEEP = rf"(?:[^()]|\({DEEP}*+\))"
NESTED = r"[^{}]"  # the same, of braces: defaults of defaults
for _ in range(4):
    NESTED = rf"(?:[^{{}}]|\{{{NESTED}*+\}})"
_VALUE = r"\$\{(?:[^{}\"\\]|\"[^\"]*\")*\}"  # within double quotes, with some of its own
_ODD = r"\$'(?:\\.|[^'\\])*'|\$\[[^][]*\]"  # `$'a\tb'`, and a sum as it once was written
INNER = rf"[$<>]\({DEEP}*+\)|{_ODD}|\$\{{{NESTED}*+\}}|`[^`]*`|\"(?:\\.|{_VALUE}|[^\"\\])*+\"|'[^']*'|\\."
_TOKEN = re.compile(
    r"\\(?P<join>[^\S\n]*)(?:\n|\Z)"  # blanks behind the backslash are meant as none
    r"|(?P<comment>(?<![^\s;&|(])#[^\n]*)"
    r"|<<(?P<dash>-?)[^\S\n]*(?P<end>(?:'[^'\n]*'|\"[^\"\n]*\"|\\.|[^\s'\"\\;&|<>()#])+)"
    rf"|(?P<open>(?<![^\s;]){NAME}\+?=\()"
    rf"|(?P<text>{INNER}|\(\({DEEP}*+\)\)|<<<|[^\s\\\"'`$#<>;&|()]+|[^\S\n]+|[^\n])|\n",
    re.DOTALL,
)
_SHELL = re.compile(r"(?:sbatch|bash|sh|ssh|srun)\b")  # what runs a here-document
_TARGET = re.compile(r"(?<![<&\d])>>?\s*(\S+)")


@dataclass(frozen=True)
class ShellJobStatement:
    """One line as bash ends it, lists on one line and comments away. target: the file, as written, that its
    here-document goes to; body: that document; literal: nothing of it is expanded.
    """

    line: str
    target: str = ""
    body: str = ""
    literal: bool = False


def statements(text: str, depth: int = 0) -> Iterator[ShellJobStatement]:
    """A script's statements, and its #SBATCH lines. depth: scripts that hold this one in a here-document.

    >>> [s.line for s in statements("A=(1 # one\\n 2)\\nx '<<0' $((1<<2)) \\\\\\n y # no")]
    ['A=(1   2)', "x '<<0' $((1<<2))  y"]
    >>> [(s.line, s.target, s.body) for s in statements("cat <<-E > f\\n\\ta\\n\\tE\\n")]
    [('cat  > f', 'f', 'a')]
    """
    text = text.replace("\r\n", "\n")
    at, whole, deep = 0, "", 0  # deep: parentheses of a list that `whole` leaves open
    ends = list[tuple[str, str]]()  # of here-documents that begin behind this line
    while (m := _TOKEN.match(text, at)) is not None:
        at = m.end()
        if m["end"] is not None:
            ends.append((m["dash"], m["end"]))
        elif m["comment"] is not None:
            if m["comment"].startswith("#SBATCH") and not whole.strip():
                yield ShellJobStatement(m["comment"])
        elif m["join"] is not None:
            whole += m["join"]
        elif deep and m[0] == "\n":
            whole += " "
        elif m["text"] is not None or m["open"] is not None:
            deep += m["open"] is not None or (deep > 0 and (m[0] == "(") - (m[0] == ")"))
            whole += re.sub(r"\\([^\S\n]*)\n", r"\1", m[0]) if m[0].startswith('"') else m[0]
        else:
            found, at = _documents(whole, ends, text, at)
            if _SHELL.match(found.line) and found.body and depth < 3:
                yield from statements(found.body if found.literal else found.body.replace("\\$", "$"), depth + 1)
            elif found.line:
                yield found
            whole, ends = "", []
    if whole.strip():
        yield ShellJobStatement(whole.strip())


def _documents(whole: str, ends: list[tuple[str, str]], text: str, at: int) -> tuple[ShellJobStatement, int]:
    """A line with the last of its here-documents, and where the script goes on behind them."""
    line, lines, end = whole.strip(), list[str](), ""
    for dash, end in ends:
        word, lines = re.sub(r"['\"\\]", "", end), []
        while at < len(text):
            stop = (text.find("\n", at) + 1 or len(text) + 1) - 1
            one, at = text[at:stop].lstrip("\t" if dash else ""), stop + 1
            if one == word:
                break
            lines.append(one)
    target = _TARGET.search(line)
    name = target[1].strip("'\"") if ends and target is not None else ""
    return ShellJobStatement(line, name, "\n".join(lines), not end.isidentifier()), at

"""Which commands of a shell script run: its `if`, `case`, `&&`, `||` and loops, as far as the file itself decides."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase

from piper_sim.frameworks.statements import NAME
from piper_sim.frameworks.sums import ANSWER


class ShellJobTruth(StrEnum):
    """Whether a condition holds, or a command runs."""

    YES = "yes"
    NO = "no"
    MAYBE = "maybe"  # the file does not say


YES, NO, MAYBE = ShellJobTruth
_NOT = {YES: NO, NO: YES, MAYBE: MAYBE}
_TESTS = {"[": "]", "[[": "]]", "test": "", "((": "))"}
_WORDS = {"true": YES, ":": YES, "false": NO}
_SAME, _ORDERS = {"=", "=="}, {"<": "-lt", ">": "-gt", "<=": "-le", ">=": "-ge", "==": "-eq", "!=": "-ne"}
_ORDERED = {*_ORDERS.values()}  # named as Python's operators are
_UNSET_NAME = re.compile(r'"?\$\{?([A-Za-z_]\w*)\}?"?')
_LOOPS = {"while", "until", "for", "select"}
_FUNCTION = re.compile(r"(?:function ([\w:.-]+)(?: ?\(\))?|([\w:.-]+) ?\(\)) \{(?: |$)")


@dataclass
class ShellJobBlock:
    """One `if`, `case`, loop or `{` that is open. word: a case's, else None; arm: whether the one that we are in runs;
    before: whether one above it did; asking: we stand in a condition, or where a pattern has to come; holds: the
    condition, as far as it is read; pattern: words of one that is not closed; unknown: the file does not say the word;
    group: it is a `{`; function: of one; loop: the word that begins one; outside: whether what it stands in runs.
    """

    word: str | None = None
    arm: ShellJobTruth = YES
    before: ShellJobTruth = NO
    asking: bool = True
    holds: ShellJobTruth | None = None
    pattern: list[str] = field(default_factory=list)
    unknown: bool = False
    group: bool = False
    function: bool = False
    loop: str = ""
    outside: ShellJobTruth = YES

    def enter(self, holds: ShellJobTruth) -> None:
        """Go into an arm whose own condition is `holds`."""
        self.arm = NO if self.before is YES else MAYBE if self.before is MAYBE and holds is YES else holds
        self.before = YES if holds is YES else MAYBE if MAYBE in (holds, self.before) else self.before
        self.asking, self.holds, self.pattern = False, None, []

    def ask(self) -> None:
        """Leave an arm for the next condition."""
        self.arm, self.asking, self.holds = YES, True, None


@dataclass
class ShellJobBranches:
    """Where a script's reader stands. value: a word as written to what it stands for, None where the file does not say;
    known: whether a variable is set by the file; called: whether a function is.
    """

    value: Callable[[str], str | None]
    known: Callable[[str], bool]
    called: Callable[[str], bool] = bool
    blocks: list[ShellJobBlock] = field(default_factory=list)
    status: ShellJobTruth = YES

    def step(self, words: list[str], joined: str) -> tuple[list[str], ShellJobTruth]:
        """The words of a command behind its keywords, and whether it runs. joined: what stood before it: `&&`, `;`."""
        words = self._keywords(list(words))
        while True:
            here, outer = self.blocks[-1] if self.blocks else None, self._outer()
            if here is not None and here.asking:
                if words and here.word is None:
                    here.holds = _joined(here.holds, joined, self.decide(words) if outer is YES else MAYBE)
                return words, outer
            runs = {"&&": self.status, "||": _NOT[self.status]}.get(joined, YES)
            function = _FUNCTION.match(" ".join(words))
            if function is None and "{" not in (*words[:1], *words[-1:]):
                break
            # A group, or a function, whose body stands for its calls.
            doubt = function is not None and not self.called(function[1] or function[2]) and runs is YES
            arm = MAYBE if doubt else runs
            block = ShellJobBlock(arm=arm, asking=False, group=True, function=function is not None, outside=outer)
            self.blocks.append(block)
            words, joined = self._keywords(words[words.index("{") + 1 :]), ";"
        if NO in (outer, runs) or not words:
            return [], NO
        self.status = MAYBE if runs is MAYBE else self.decide(words) if words[0] in {*_TESTS, *_WORDS} else YES
        return words, MAYBE if MAYBE in (outer, runs) else YES

    @property
    def groups(self) -> int:
        """In how many groups and functions we stand."""
        return sum(b.group for b in self.blocks)

    @property
    def inside(self) -> bool:
        """Whether we stand in a function."""
        return any(b.function for b in self.blocks)

    @property
    def patterns(self) -> bool:
        """Whether a pattern of a `case` comes next."""
        return bool(self.blocks) and self.blocks[-1].asking and self.blocks[-1].word is not None

    def arm_ends(self) -> None:
        """`;;`."""
        if self.blocks and self.blocks[-1].word is not None:
            self.blocks[-1].ask()

    def decide(self, words: Sequence[str]) -> ShellJobTruth:
        """A command that tests something.

        >>> values = {"$A": "3", '"$A"': "3", "$B": None}
        >>> b = ShellJobBranches(lambda w: values.get(w, w), {"A"}.__contains__)
        >>> [str(b.decide(w.split())) for w in ("[ $A -gt 2 ]", '[[ "$A" != 3 ]]', "[ $B = x ]", "[ -f x ]", "! true")]
        ['yes', 'no', 'maybe', 'maybe', 'no']
        """
        turned, words = _turned(words)
        if words and words[0][:2] == "((" and words[-1][-2:] == "))":  # with or without blanks
            words = ["((", *re.findall(r"[<>=!]=?|[^<>=!\s]+", " ".join(words)[2:-2]), "))"]
        if not words or words[0] not in _TESTS:
            said = self.value(words[0]) if len(words) == 1 else None
            found = _WORDS.get(said or "", MAYBE)
            return _NOT[found] if turned else found
        closing = _TESTS[words[0]]
        if closing and words[-1] != closing:
            return MAYBE
        again, inner = _turned(words[1:-1] if closing else words[1:])
        found = self._test(inner, words[0])
        return _NOT[found] if turned != again else found

    def _test(self, inner: Sequence[str], kind: str) -> ShellJobTruth:
        if len(inner) == 2 and inner[0] in ("-z", "-n"):
            name = _UNSET_NAME.fullmatch(inner[1])
            said = "" if name and not self.known(name[1]) else self.value(inner[1])  # as `${NAME:-…}` takes it
            if said == "" and kind != "[[" and inner[1][0] not in "\"'":  # there is no such word: `[ -n ]` holds
                return YES
            empty = MAYBE if said is None else YES if said == "" else NO
            return empty if inner[0] == "-z" else _NOT[empty]
        if len(inner) == 1 and kind != "((":
            said = self.value(inner[0])
            return MAYBE if said is None else YES if said else NO
        if len(inner) != 3:
            return MAYBE
        left, op, right = inner
        a, b = (self.value(f"$(({x}))" if kind == "((" else x) for x in (left, right))
        if a is None or b is None:
            return MAYBE
        if kind in ("[", "test") and any(x == "" and word[0] not in "\"'" for x, word in ((a, left), (b, right))):
            return NO  # nor here, which is an error
        op = _ORDERS.get(op, op) if kind == "((" else op
        if op in _SAME or op == "!=":
            same = _like(a, b, right) if kind == "[[" else a == b
            return YES if same == (op != "!=") else NO
        if op not in _ORDERED or not all(re.fullmatch(r"-?\d{1,15}", x) for x in (a, b)):
            return MAYBE
        return YES if getattr(operator, op[1:])(int(a), int(b)) else NO

    def _outer(self) -> ShellJobTruth:
        both = (self.blocks[-1].arm, self.blocks[-1].outside) if self.blocks else ()
        return NO if NO in both else MAYBE if MAYBE in both else YES

    def _keywords(self, words: list[str]) -> list[str]:
        """Follow the keywords that a command starts with."""
        while words:
            here = self.blocks[-1] if self.blocks else None
            key = words[0]
            if here is not None and here.word is not None and here.asking and key != "esac":
                end = next((i for i, w in enumerate(words) if w.endswith(")")), None)
                here.pattern += words if end is None else words[: end + 1]
                if end is None:
                    return []
                here.enter(self._matches(here))
                words = words[end + 1 :]
                continue
            if key == "if":
                self.blocks.append(ShellJobBlock(outside=self._outer()))
            elif key == "case" and len(words) > 1:
                said = self.value(words[1])
                self.blocks.append(ShellJobBlock(word=said or "", unknown=said is None, outside=self._outer()))
                words = words[2:]
            elif here is not None and key == "elif":
                here.ask()
            elif key in _LOOPS and len(words) > 1:
                self.blocks.append(ShellJobBlock(loop=key, outside=self._outer()))
                if key in ("for", "select"):  # each round has another value
                    return [f"{name}={ANSWER}" for name in re.findall(NAME, words[1])[:1]]
            elif here is not None and key == "do":
                none = (here.loop, here.holds) in (("while", NO), ("until", YES))
                here.enter(NO if none else MAYBE)  # as often as somebody knows
            elif here is not None and key == "then":
                here.enter(here.holds or MAYBE)
            elif here is not None and key == "else":
                here.enter(YES)
            elif here is not None and (key in ("fi", "esac", "done") if not here.group else key == "}"):
                self.blocks.pop()
            else:
                return words
            words = words[1:]
        return words

    def _matches(self, block: ShellJobBlock) -> ShellJobTruth:
        """Whether a case's word is of a pattern, `a|b)` or `*)`."""
        patterns = "|".join(block.pattern).removeprefix("(").removesuffix(")").split("|")
        known = [self.value(p) for p in patterns]
        if "*" in patterns:
            return YES
        if block.unknown or None in known:
            return MAYBE
        pairs = zip(known, patterns, strict=True)
        return YES if any(p is not None and _like(block.word or "", p, written) for p, written in pairs) else NO


def _joined(left: ShellJobTruth | None, sign: str, right: ShellJobTruth) -> ShellJobTruth:
    """What two commands say together: of a list, the last one decides."""
    strong = {"&&": NO, "||": YES}.get(sign)
    if left is None or strong is None or right is strong:
        return right
    return left if left is strong or right is _NOT[strong] else MAYBE


def _like(word: str, pattern: str, written: str) -> bool:
    """Whether a word is of a pattern, of which nothing stands for anything else where it is written in quotes."""
    return word == pattern if written[:1] in ("'", '"') else fnmatchcase(word, pattern.replace("[^", "[!"))


def _turned(words: Sequence[str]) -> tuple[bool, Sequence[str]]:
    """Whether `!` in front turns an answer round, and the words behind."""
    first = next((i for i, w in enumerate(words) if w != "!"), len(words))
    return first % 2 == 1, words[first:]

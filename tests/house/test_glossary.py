"""Public classes are named in the words of docs/GLOSSARY.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("ir", "cost_models", "piper_sim", "executor")
GIVEN = {"Comparison"}  # the library's, by contract
_WORD = re.compile(r"DType|[A-Z]+(?![a-z])|[A-Z][a-z0-9]*")


def terms(page: str) -> list[str]:
    """The words of the page's table."""
    return re.findall(r"^\| \*\*([a-z]+)\*\* \| \S", page, re.MULTILINE)


def stray(names: list[str], known: list[str]) -> list[str]:
    """Names without a word of the glossary; what ends in Error, or makes errors, says what it is."""

    def told(name: str) -> bool:
        words = [w.lower() for w in _WORD.findall(name)]
        return "error" in name.lower() or any(w in known or w.removesuffix("s") in known for w in words)

    return [n for n in names if n not in GIVEN and not told(n)]


def test_the_glossary_has_forty_words_at_most_and_each_once() -> None:
    known = terms((ROOT / "docs" / "GLOSSARY.md").read_text())
    assert 20 < len(known) <= 40 and len(set(known)) == len(known)


def test_public_classes_carry_a_word_of_the_glossary() -> None:
    known = terms((ROOT / "docs" / "GLOSSARY.md").read_text())
    files = [p for package in PACKAGES for p in (ROOT / package).rglob("*.py")]
    bodies = [(p, ast.parse(p.read_text()).body) for p in files]
    named = [(n.name, p) for p, body in bodies for n in body if isinstance(n, ast.ClassDef) and n.name[0] != "_"]
    assert len(named) > 200
    found = stray([name for name, _ in named], known)
    assert not found, [f"{name} in {p.relative_to(ROOT)}" for name, p in named if name in found]


def test_a_private_word_is_seen() -> None:
    assert stray(["Meeting", "Lookout", "MeetingOp", "RankPlan", "DType", "PiperError"], ["op", "rank", "dtype"]) == [
        "Meeting",
        "Lookout",
    ]

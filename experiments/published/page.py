"""docs/PUBLISHED.md, written from the scores."""

from collections.abc import Mapping
from pathlib import Path
from string import Template

from experiments.published.report import Found, alike, confusion, summary, without
from experiments.published.score import PredictionErrors, times
from experiments.published.sure import coverage

PAGE = Path(__file__).parents[2] / "docs" / "PUBLISHED.md"
PICTURE = PAGE.with_name("published.png")


def page(found: Found, controls: Mapping[str, Found]) -> str:
    """The whole page: page.md with its tables."""
    return Template(Path(__file__).with_suffix(".md").read_text(encoding="utf-8")).substitute(
        picture=PICTURE.name,
        summary=summary(found),
        alike=alike(found),
        fits=confusion(found),
        sure="\n".join(coverage(found)),
        missing="\n".join(without(found) or ["Nothing."]),
        assumed="\n".join(f"- **{s.name}**: {s.title}. {s.assumed}".rstrip() for s in found),
        controls=control_table(found, controls),
    )


def control_table(found: Found, controls: Mapping[str, Found]) -> str:
    """Median errors of time by data set, as they are and under each control."""
    out = ["| data set | frozen files | " + " | ".join(controls) + " |", "|---|--:|" + "--:|" * len(controls)]
    for s in found:
        spreads = [PredictionErrors.of(times(f[s])) for f in (found, *controls.values())]
        if all(spreads):
            out.append(f"| {s.name} | " + " | ".join(f"{100 * x.median:.1f} %" for x in spreads if x) + " |")
    return "\n".join(out)

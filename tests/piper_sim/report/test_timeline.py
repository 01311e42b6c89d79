"""The text timeline: exact cells for exact times, to scale otherwise."""

import re

import pytest

from ir.trace.trace import Trace
from piper_sim.app.commands.output import show_timeline
from piper_sim.report.look import INDEX, LOOKS
from piper_sim.report.timeline import text_timeline

GRID = """\
0 |0F0 0F1 0F2 ... ... ... ... 0B0 0B0 ... 0B1 0B1 ... 0B2 0B2
1 |... 1F0 1F1 ... ... 1B0 1B0 1F2 1B1 1B1 ... 1B2 1B2
2 |... ... 2F0 2B0 2B0 2F1 2B1 2B1 2F2 2B2 2B2"""


def test_a_small_schedule_is_an_exact_grid(make_trace) -> None:
    assert text_timeline(make_trace(ranks=3, mbs=3)) == GRID


def test_a_grid_of_another_unit_says_its_cell(make_trace) -> None:
    text = text_timeline(make_trace(ranks=3, mbs=3, f=0.25, b=0.5))
    assert text == GRID + "\none cell is 250 ms"


def test_a_grid_starts_at_the_first_op() -> None:
    rows = [(0, 0, "compute", "0F0", 100.0, 100.0, 101.0), (0, 0, "compute", "0F1", 102.0, 102.0, 103.0)]
    assert text_timeline(Trace.of({}, rows)) == "0 |0F0 ... 0F1"


def test_ranks_are_as_wide_as_the_widest_and_messages_have_no_line() -> None:
    rows = [(0, 10, "compute", "0F0", 0, 0, 1), (0, 10, "ep", "0F0/l0.dispatch", 1, 1, 2)]
    assert text_timeline(Trace.of({}, [*rows, (0, 2, "compute", "1F0", 0, 0, 1)])) == " 2 |1F0\n10 |0F0"


def test_a_fused_pair_shows_both_members() -> None:
    rows = [(0, 0, "compute", "(0F7;7B3)OVERLAP_F_B", 0, 0, 2)]
    assert text_timeline(Trace.of({}, rows)) == "0 |0F7;7B3 0F7;7B3"


def test_what_does_not_fit_the_width_is_drawn_to_scale(make_trace) -> None:
    text = text_timeline(make_trace(ranks=3, mbs=3), width=50)
    axis, *lanes, legend = text.splitlines()
    assert axis.split()[0] == "0"
    assert len(lanes) == 3
    assert max(map(len, lanes)) == 50
    assert lanes[2].startswith("rank 2  60 |")
    assert legend == "percent busy · F forward · B backward · . idle · one column is 395 ms"


def test_many_ranks_are_sampled_and_the_last_one_is_shown(make_trace) -> None:
    text = text_timeline(make_trace(ranks=40, mbs=4, f=0.1, b=0.31), width=90)
    lanes = [line for line in text.splitlines() if line.startswith("rank")]
    assert len(lanes) == 16
    assert lanes[0].startswith("rank  0")
    assert lanes[-1].startswith("rank 39")
    assert "16 of 40 ranks" in text


def test_degenerate_traces_have_a_text() -> None:
    assert text_timeline(Trace.of({}, [])) == "(no ops)"
    assert text_timeline(Trace.of({}, [(0, 0, "ep", "x", 0, 0, 1)])) == "(no ops)"
    assert "rank 0" in text_timeline(Trace.of({}, [(0, 0, "compute", "0F0", 1, 1, 1)]))


@pytest.mark.parametrize("parts", [("F", "B"), ("F", "B", "F", "B"), ("F",)])
@pytest.mark.parametrize("busy", [0.1, 0.45, 0.66, 0.9])
def test_the_share_of_dots_is_the_share_of_idle_time(parts: tuple[str, ...], busy: float) -> None:
    """Ops much shorter than a column: a rank that is 66 % busy by two kinds of op, a third each, is no row of dots."""
    each = busy / len(parts) * 1e-3
    rows = [
        (0, 0, "compute", f"0{k}{n}", t, t, t + each)
        for n in range(3000)
        for i, k in enumerate(parts)
        for t in [n * 1e-3 + i * each]
    ]
    rows.append((0, 0, "compute", "0F9999", 3.0 - 1e-9, 3.0 - 1e-9, 3.0))
    line = text_timeline(Trace.of({}, rows), 120).splitlines()[1]
    percent, glyphs = line.split("|")
    assert abs(glyphs.count(".") / len(glyphs) - (1 - busy)) < 2 / len(glyphs)
    assert abs(int(percent.split()[-1]) - 100 * busy) <= 1
    assert all(abs(glyphs.count(k) / len(glyphs) - busy / len(set(parts))) < 2 / len(glyphs) for k in set(parts))


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_has_the_same_text_in_colours(
    make_trace, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TERM", "xterm-256color"), ("COLORTERM", "truecolor"), ("COLUMNS", str(columns))):
        monkeypatch.setenv(name, value)
    for trace in (make_trace(ranks=4, mbs=4), make_trace(ranks=4, mbs=40, f=0.7)):  # a grid, and bands
        plain = text_timeline(trace, columns)
        assert all(len(line) <= columns for line in plain.splitlines())
        show_timeline(trace)
        assert capsys.readouterr().out == plain + "\n", "into a file or a pipe"
        with monkeypatch.context() as terminal:
            terminal.setattr("sys.stdout.isatty", lambda: True)
            show_timeline(trace)
            found = capsys.readouterr().out
            assert "".join(re.split(r"\x1b\[[\d;]*m", found)) == plain + "\n"
            for key in ("F", "B"):  # each in the colour that picture and page have
                colour = LOOKS[INDEX[key]].colour
                code = ";".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
                assert f"38;2;{code}m" in found
            terminal.setenv("NO_COLOR", "1")
            show_timeline(trace)
            assert "38;2" not in capsys.readouterr().out

"""`[history]` on the command line: residuals before the prediction, a correction only where it is asked for."""

from pathlib import Path

import pytest

from piper_sim.report.units import duration

HEAD = "schedule.name,schedule.microbatches,iteration_s\n"


@pytest.fixture
def past(cli, job, tmp_path: Path):
    """A job with a table of five runs that took 1.25 times what is predicted."""
    lines = [HEAD]
    for name, mbs in (("1f1b", 4), ("1f1b", 8), ("gpipe", 4), ("gpipe", 8), ("zb1p", 4)):
        sets = ("--set", f"schedule.name={name}", "--set", f"schedule.microbatches={mbs}")
        seconds = cli("simulate", job(), *sets).json["iteration_s"]
        lines.append(f"{name},{mbs},{1.25 * seconds!r}\n")
    (tmp_path / "past.csv").write_text("".join(lines))
    return job(history={"file": "past.csv"})


def test_residuals_come_before_the_prediction(cli, past):
    found = cli("simulate", past).json
    history = found["history"]
    assert history["suggestion"]["factor"] == pytest.approx(1.25)
    assert history["fits"] == {"ran_fits": 5, "ran_does_not_fit": 0, "oom_fits": 0, "oom_does_not_fit": 0}
    assert "correction" not in found and found["cost_source"] == "modelled"
    text = cli("simulate", past, as_json=False).out
    assert text.index("5 past runs") < text.index("suggested: seconds x 1.250") < text.index("memory at the peak")


def test_a_correction_is_applied_where_it_is_asked_for_and_says_so(cli, past):
    plain = cli("simulate", past).json
    found = cli("simulate", past, "--set", "history.apply=true").json
    assert found["iteration_s"] == pytest.approx(1.25 * plain["iteration_s"])
    assert found["correction"]["raw"]["iteration_s"] == plain["iteration_s"]
    assert found["cost_source"] == "modelled, corrected by history"
    text = cli("simulate", past, "--set", "history.apply=true", as_json=False).out
    assert "corrected by the past runs, x 1.250" in text


def test_a_report_corrects_all_seconds_but_its_timelines(cli, past, tmp_path):
    """A step's in its facts, and those of what-ifs, stand beside the answer, which is corrected."""
    found = cli("simulate", past, "--set", "history.apply=true", "--out", str(tmp_path / "out")).json
    page = (tmp_path / "out" / "report.html").read_text()
    raw = found["correction"]["raw"]["iteration_s"]
    assert f"<dt>step</dt><dd>{found['iteration_s']:.4g} s</dd>" in page
    assert f"<dt>timeline</dt><dd>as predicted, a step of {raw:.4g} s</dd>" in page
    table = page.partition("<h2>What if</h2>")[2].partition("</table>")[0]
    slower = [c for c in cli("explain", past).json["what_ifs"] if c["gain_s"] != 0]
    assert slower
    for change in slower:
        step, gain = (duration(1.25 * change[key]) for key in ("iteration_s", "gain_s"))
        cells = f'<td>{change["name"]}</td><td class="number">{step}</td><td class="number">{gain}</td>'
        assert cells in table
    assert f"<dd>{raw:.4g} s</dd>" not in page


def test_compare_corrects_every_row(cli, past):
    args = ("compare", past, "--schedules", "1f1b,zb1p")
    plain, found = cli(*args).json, cli(*args, "--set", "history.apply=true").json
    assert found["history"]["suggestion"] == plain["history"]["suggestion"]
    raw = {r["schedule"]: r["iteration_s"] for r in plain["rows"]}
    for r in found["rows"]:
        assert r["iteration_s"] == pytest.approx(1.25 * raw[r["schedule"]])
    assert cli(*args, as_json=False).out.index("5 past runs") == 0


def test_a_sweep_corrects_as_simulate_does_and_search_and_explain_say_that_they_do_not(cli, past):
    asked = ("--set", "history.apply=true")
    rows = cli("sweep", past, "--try", "schedule.microbatches=[4, 8]", *asked).json["rows"]
    alone = [cli("simulate", past, *asked, "--set", f"schedule.microbatches={m}").json for m in (4, 8)]
    assert [r["iteration_s"] for r in rows] == [a["iteration_s"] for a in alone]
    assert all(r["correction"]["factor"] == pytest.approx(1.25) for r in rows)
    for command in (("explain", past), ("search", past, "--set", "schedule.global_batch=8", "--budget", "0")):
        assert f"warning: history.apply: {command[0]} has" in cli(*command, *asked).err
        assert "history.apply" not in cli(*command).err


def test_a_bad_row_stops_everything(cli, job, tmp_path):
    (tmp_path / "past.csv").write_text(HEAD + "1f1b,4,1.0\ndualpip,4,1.0\n")
    found = cli("simulate", job(history={"file": "past.csv"}))
    assert found.code == 2
    assert found.error["key"] == "line 3, column schedule.name"
    assert found.error["file"] == str(tmp_path / "past.csv")
    assert found.error["suggestion"] == "dualpipe"

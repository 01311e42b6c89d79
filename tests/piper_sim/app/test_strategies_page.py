"""docs/STRATEGIES.md: its example is a strategy, and does what the page says."""

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "STRATEGIES.md"


def _example() -> list[dict[str, Any]]:
    (found,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.S)
    return list(json.loads(found))


def test_zero_3_on_the_experts_alone_takes_a_directive_and_nothing_else(cli: Any, job: Any, tmp_path: Path) -> None:
    file = job(model={"num_hidden_layers": 8}, parallel={"ep": 1})
    plan = cli("plan", file).json
    ours, example = plan["directives"], _example()
    at = next(i for i, d in enumerate(ours) if d["op"] == "replicate")
    assert ours[at] == example[0], "the page shows the job's own line first"
    strategy = tmp_path / "strategy.json"
    strategy.write_text(json.dumps([*ours[:at], *example, *ours[at + 1 :]]))

    given = f'schedule.directives="{strategy}"'
    changed = cli("plan", file, "--set", given).json
    gathers = [op for op in changed["programs"]["0"] if "AG_" in op]
    assert gathers and all("experts" in op for op in gathers)
    assert not [op for op in plan["programs"]["0"] if "AG_" in op]
    before, after = (cli("simulate", file, *more).json["memory"]["breakdown_bytes"] for more in ((), ("--set", given)))
    assert after["0"]["parameters"] < before["0"]["parameters"]
    assert after["0"]["optimizer"] == before["0"]["optimizer"], "both shard it over the same ranks"

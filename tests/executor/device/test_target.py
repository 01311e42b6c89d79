"""Virtual ranks are threads: when they ask for one function at once, each gets it, not a module half loaded."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from executor.runtime.target import find


def test_threads_that_ask_at_once_wait_for_the_module(tmp_path: Path) -> None:
    file = tmp_path / "slow_target.py"
    file.write_text("import time\ntime.sleep(0.1)\n\n\ndef fn():\n    return 1\n")
    target = {"module": "piper_slow_target", "file": str(file), "name": "fn"}
    try:
        with ThreadPoolExecutor(4) as threads:
            assert [f() for f in threads.map(lambda _: find(target), range(4))] == [1] * 4
    finally:
        sys.modules.pop("piper_slow_target", None)

"""run.py with a stopwatch around its parts, and the stand-in worker below the engine.

timed_run.py ROOT OUTPUT.json STARTED [flags of run.py]: STARTED is the time.time() at which the process was asked for.
Seconds of a part are its own, without those of the parts that it calls.
"""

from __future__ import annotations

import functools
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import run  # noqa: E402
from nightshift import console, experiment  # noqa: E402
from nightshift import setup as lab  # noqa: E402
from nightshift.campaign.ledger import Ledger  # noqa: E402
from nightshift.engines.trl.engine import TrlEngine, TrlSession  # noqa: E402
from nightshift.rules import Rules  # noqa: E402

# What the harness waits for: the worker's start, its training, its answers.
ENGINE = ("worker starts", "worker trains", "worker completes")
PARTS: list[tuple[Any, str, str]] = [
    (lab, "open_lab", "put the lab together, hash the rules"),
    (TrlEngine, "prepare_at_start", "prepare what is missing"),
    (experiment, "run_experiment", "the rest of run_experiment"),
    (experiment, "finish_earlier", "finish what was interrupted"),
    (experiment, "admit", "compare with campaign and branch"),
    (experiment, "require_ready", "engine.check"),
    (experiment, "examples_of", "load the selection set"),
    (experiment, "evaluate", "score and write the evaluation"),
    (experiment, "examine", "health of the curves"),
    (experiment, "settle", "settle in git"),
    (Ledger, "reserve", "ledger: reserve"),
    (Ledger, "write", "ledger: write"),
    (Ledger, "close", "ledger: close and results.tsv"),
    (Ledger, "keep_model", "ledger: keep one model"),
    (TrlEngine, "open", ENGINE[0]),
    (TrlSession, "train", ENGINE[1]),
    (TrlSession, "load_final_weights", ENGINE[2]),
    (TrlSession, "complete", ENGINE[2]),
    (TrlSession, "close", "stop the processes"),
    (console, "print_summary", "print the summary"),
]


class Stopwatch:
    """Own seconds of each part."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._running: list[str] = []
        self._since = time.perf_counter()

    def switch(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def around(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            self.switch()
            self._running.append(part)
            try:
                return function(*arguments, **keywords)
            finally:
                self.switch()
                self._running.pop()

        return timed


def main() -> None:
    root, output, started, flags = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]
    watch = Stopwatch()
    for owner, name, part in PARTS:
        setattr(owner, name, watch.around(getattr(owner, name), part))

    def stand_in(rules: Rules, root: Path, environ: dict[str, str], *flags: object) -> TrlEngine:
        return TrlEngine(rules, root, environ, trainer=HERE.parent / "tests" / "stand_in_trainer.py")

    lab.open_engine = stand_in  # type: ignore[assignment]
    run.ROOT = root
    watch.seconds["start Python and import"] = time.time() - started
    try:
        run.main(flags)
    finally:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        result = {"seconds": watch.seconds, "cpu_seconds": time.process_time(), "peak_memory_mb": peak / 1e6}
        output.write_text(json.dumps({**result, "ended": time.time()}))


if __name__ == "__main__":
    main()

"""A stopwatch around the parts of an experiment, for overhead.py: a copy of this file lies in the site-packages of a
throw-away checkout, and a .pth file there has every Python process import it. It notices what is imported of
nightshift and wraps what PARTS names. Seconds of a part are its own, without those of the parts that it calls.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

# What the harness waits for: the trainer's start, its training, its answers.
ENGINE = ("trainer starts", "trainer trains", "trainer completes")
START, WORKER_START, REST = "start Python and import", "the same in the worker", "the rest"
WAIT = "between head and worker"  # the system's start of a process, and until its end is noticed
# Functions and methods by name, whatever module they stand in; also those of other commits, to compare with.
PARTS = {
    "open_lab": "put the setup together",
    "open_setup": "put the setup together",
    "Rules.hash": "hash the rules",
    "Rules.harness_tree": "hash the harness",
    "prepare_missing": "prepare what is missing",
    "TrlEngine.prepare_at_start": "prepare what is missing",
    "run_experiment": "the rest of run_experiment",
    "finish_earlier": "finish what was interrupted",
    "resume": "finish what was interrupted",
    "admit": "compare with the campaign",
    "changed_harness_files": "compare the harness with git",
    "require_ready": "engine.check",
    "LocalPool.submit": "start the worker",
    "LocalPool.wait": WAIT,
    "LocalPool.result": "take the result",
    "selection_set": "load the selection set",
    "examples_of": "load the selection set",
    "evaluate": "score and write the evaluation",
    "judge": "decide",
    "examine": "health of the curves",
    "settle": "settle in git",
    "Ledger.reserve": "ledger: reserve",
    "Ledger.write": "ledger: write",
    "Ledger.close": "ledger: close and results.tsv",
    "Ledger.keep_model": "ledger: keep one model",
    "keep_model": "ledger: keep one model",
    "TrlEngine.open": ENGINE[0],
    "TrlSession.train": ENGINE[1],
    "TrlSession.load_final_weights": ENGINE[2],
    "TrlSession.complete": ENGINE[2],
    "TrlSession.close": "stop the processes",
    "ProcessGroup.stop": "stop the processes",
    "print_text": "print the summary",
}
OUTPUT = Path(__file__).with_name("stopwatch-output")  # holds the path of a folder: a file a process is left there


class Stopwatch:
    """Own seconds of each part of this process."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.began = time.time()
        self.seconds: Counter[str] = Counter()
        self._running = [START]
        self._since = time.perf_counter()

    def switch(self) -> None:
        now = time.perf_counter()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def around(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            self.switch()
            self._running[0] = REST  # whatever came before the first part was the start
            self._running.append(part)
            try:
                return function(*arguments, **keywords)
            finally:
                self.switch()
                self._running.pop()

        return timed

    def wrap(self, module: ModuleType) -> None:
        """Put the watch around what a fresh module defines."""
        for name, part in PARTS.items():
            owner_name, _, attribute = name.rpartition(".")
            owner = getattr(module, owner_name, None) if owner_name else module
            function = vars(owner).get(attribute) if owner is not None else None
            if getattr(function, "__module__", None) == module.__name__:
                setattr(owner, attribute, self.around(function, part))  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """As the first finder of sys.meta_path: modules of nightshift are wrapped once they are executed."""
        if not name.startswith("nightshift."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.wrap(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def tell(self) -> None:
        """At the end of the process."""
        self.switch()
        unit = 1 if sys.platform == "darwin" else 1024
        told = {
            "is_head": any(word.endswith("run.py") for word in sys.orig_argv),
            "seconds": self.seconds,
            "cpu_seconds": time.process_time(),
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6,
            "began": self.began,
            "ended": time.time(),
        }
        if len(self.seconds) > 1:  # a process of the harness
            (self.output / f"{os.getpid()}.json").write_text(json.dumps(told))


if OUTPUT.exists():
    watch = Stopwatch(Path(OUTPUT.read_text()))
    sys.meta_path.insert(0, watch)
    atexit.register(watch.tell)

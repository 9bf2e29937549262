"""The process that loads a taskset, or a package's `scoring`, and scores. nightshift/evaluation/scorer.py starts it.

Requests are JSON lines on stdin, replies are JSON lines on stdout. A request to play has several replies; the last one
has `finished`. The loaded code gets /dev/null as stdin and stdout. A fork of this process exits instead of replying.
"""

import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


class Loaded:
    """A taskset after `open`."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from nightshift_taskset import tasks, v0

        self._tasks, self._range = tasks, spec["reward_range"]
        place = Path(spec["place"])
        # Tool servers are processes that import the package, too.
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], *spec["path"], str(place.parent)])
        self._name, self._spec = v0.adapted(tasks.import_package(place), spec)
        self._sets = tasks.split(tasks.open_taskset(self._name, self._spec), self._spec)
        self._by_key = {tasks.identity(task): task for members in self._sets.values() for task in members}

    def answer(self, request: Mapping[str, Any], send: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Return the examples of a set or the score of a text, or play the episodes of examples (rollouts.py)."""
        if name := request.get("load"):
            return {"examples": [self._example(task) for task in self._sets[name]]}
        if keys := request.get("play"):
            from nightshift_taskset import rollouts

            env = rollouts.open_environment(self._name, self._spec)
            policy = {**request["policy"], "seat": self._spec["seat"] or "agent", "reward_range": self._range}
            return rollouts.play(env, {key: self._by_key[key] for key in keys}, policy, send)
        reward = self._tasks.reward_of(self._by_key[request["score"]], request["text"])
        return {"score": self._tasks.as_score(reward, self._range)}

    def _example(self, task: Any) -> dict[str, Any]:
        answer = getattr(task.data, "answer", "")
        text = answer if isinstance(answer, str) else json.dumps(answer, default=str)
        return {"key": self._tasks.identity(task), "answer": text, "messages": self._tasks.chat(task)}


class Scoring:
    """The module `scoring` of one of Nightshift's packages after `open`."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._score = importlib.import_module(spec["scoring"]).score
        self._score("x", "y")  # so that imports do not count as the time of the first answer

    def answer(self, request: Mapping[str, Any], send: Any) -> dict[str, Any]:
        """Return the score of a text; `score` of the request is the right answer."""
        score = self._score(request["text"], request["score"])
        if not 0 <= score <= 1:  # also NaN, which JSON cannot express
            raise ValueError(f"score {score!r} is not 0..1")
        return {"score": score}


def _place(error: BaseException) -> str:
    """Return ` (folder/file:line)` of the package's code that raised an error; "" if its message has the line."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [frame for frame in frames if frame[0].parent != _HERE and "importlib" not in str(frame[0])]
    if not frames or isinstance(error, SyntaxError):
        return ""
    file, line = frames[-1]
    return f" ({file.parent.name}/{file.name}:{line})"


def main() -> None:
    """Answer requests until stdin ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    pid = os.getpid()

    def send(reply: dict[str, Any]) -> None:
        if os.getpid() != pid:
            os._exit(0)
        line = json.dumps(reply | {"cpu_seconds": time.process_time() + sum(os.times()[2:4])}, ensure_ascii=False)
        replies.write(line.encode("utf-8", "replace") + b"\n")  # answers may contain lone surrogates
        replies.flush()

    loaded: Loaded | Scoring | None = None
    for line in requests:
        request = json.loads(line)
        try:
            if spec := request.get("open"):
                resource.setrlimit(resource.RLIMIT_DATA, (spec["memory"], spec["memory"]))
                sys.path += spec["path"]
                loaded = (Scoring if "scoring" in spec else Loaded)(spec)
                reply = {"ready": True}
                os.dup2(nothing, 2)  # until here the log gets the traceback of an error
            else:
                assert loaded is not None
                reply = loaded.answer(request, send)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: every request gets a reply
            kind, message = type(error).__name__, " ".join(str(error).split())[:400]
            failed = (f"{kind}: {message}" if message else kind) + _place(error)
            reply = {"refused": message} if kind == "Refused" else {"failed": failed}
        send(reply)


if __name__ == "__main__":
    main()

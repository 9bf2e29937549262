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
Send = Callable[[dict[str, Any]], None]
Answer = Callable[[Mapping[str, Any], Send], dict[str, Any]]


def taskset(spec: Mapping[str, Any]) -> Answer:
    """Load a taskset. Return the function that answers requests about it."""
    from nightshift_taskset import rollouts, tasks, v0

    place, reward_range = Path(spec["place"]), spec["reward_range"]
    # Tool servers are processes that import the package, too.
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], *spec["path"], str(place.parent)])
    name, spec = v0.adapted(tasks.import_package(place), spec)
    sets = tasks.split(tasks.open_taskset(name, spec), spec)
    by_key = {tasks.identity(task): task for members in sets.values() for task in members}

    def example(task: Any) -> dict[str, Any]:
        answer = getattr(task.data, "answer", "")
        text = answer if isinstance(answer, str) else json.dumps(answer, default=str)
        return {"key": tasks.identity(task), "answer": text, "messages": tasks.chat(task)}

    def answer(request: Mapping[str, Any], send: Send) -> dict[str, Any]:
        if split := request.get("load"):
            return {"examples": [example(task) for task in sets[split]]}
        if keys := request.get("play"):
            policy = {**request["policy"], "seat": spec["seat"] or "agent", "reward_range": reward_range}
            return rollouts.play(name, spec, {key: by_key[key] for key in keys}, policy, send)
        reward = tasks.reward_of(by_key[request["score"]], request["text"])
        return {"score": tasks.as_score(reward, reward_range)}

    return answer


def scoring(spec: Mapping[str, Any]) -> Answer:
    """Import the module `scoring` of one of Nightshift's packages. Return the function that scores texts."""
    score = importlib.import_module(spec["scoring"]).score
    score("x", "y")  # so that imports do not count as the time of the first answer

    def answer(request: Mapping[str, Any], send: Send) -> dict[str, Any]:
        value = score(request["text"], request["score"])
        if not 0 <= value <= 1:  # also NaN, which JSON cannot express
            raise ValueError(f"score {value!r} is not 0..1")
        return {"score": value}

    return answer


def _place(error: BaseException) -> str:
    """Return `(folder/file:line)` of the package's code that raised an error; "" if its message has the line."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    frames = [frame for frame in frames if frame[0].parent != _HERE and "importlib" not in str(frame[0])]
    if not frames or isinstance(error, SyntaxError):
        return ""
    file, line = frames[-1]
    return f"({file.parent.name}/{file.name}:{line})"


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

    answer: Answer
    for line in requests:
        request = json.loads(line)
        try:
            if spec := request.get("open"):
                resource.setrlimit(resource.RLIMIT_DATA, (spec["memory"], spec["memory"]))
                sys.path += spec["path"]
                answer = scoring(spec) if "scoring" in spec else taskset(spec)
                reply = {"ready": True}
                os.dup2(nothing, 2)  # until here the log gets the traceback of an error
            else:
                reply = answer(request, send)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: every request gets a reply
            kind, message = type(error).__name__, " ".join(str(error).split())[:400]
            failed = " ".join(f"{kind}: {message} {_place(error)}".split()).removesuffix(":")
            reply = {"refused": message} if kind == "Refused" else {"failed": failed}
        send(reply)


if __name__ == "__main__":
    main()

"""A stand-in for the trl engine's trainer.py: speaks its protocol, trains nothing, and fails on demand.

Its "policy" answers a share of the validation split right: a made-up function of the learning rate, plus
noise from the seed. `stand-in.json` in a run's folder or in one above it can ask for a fault:
{"fault": "error" | "sigkill" | "short_answers" | "no_step" | "holds_card", "once": true}
With {"fault": "hold"} it trains, whatever budget and max_steps say, for as long as the file is there. With {"fault":
"rewards"} rewards are the share that its policy would get right. With {"fault": "no_gradient"} every group has reward
0, with {"fault": "late_no_gradient"} after its third step. It ends a training when a command arrives, as the real one
does.
"""

import hashlib
import importlib
import json
import math
import os
import random
import re
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.02


def emit(**event: object) -> None:
    print(json.dumps(event), flush=True)


def fault_of(path: Path | None) -> str | None:
    if path is None:
        return None
    order = json.loads(path.read_text())
    if order.get("once"):
        path.unlink()
    return str(order["fault"])


def right_of(lr: float, seed: int) -> float:
    """The share of the validation split that a run gets right, about: 0.60 at a scaled learning rate of 6e-4, falling
    off on both sides in log space; tiny ones teach nothing."""
    share = 0.20 + 0.40 * math.exp(-((math.log10(lr / 6e-4)) ** 2) / 0.5)
    return share + random.Random(seed).gauss(0, 0.005)


def is_right(question: str, right: float) -> bool:
    """Whether a policy with that share gets this one right."""
    return int(hashlib.sha256(question.encode()).hexdigest()[:8], 16) / 2**32 < right


def answer_to(question: str, data: Any) -> int:
    """Worked out as a reader would who knows the sizes: quicker than to draw the whole set for its answers."""
    total = 0
    for verb, number, container in re.findall(r"(\w+) (?:(\d+)|a (\w+) of) \w+\.", question):
        amount = int(number) if number else data.CONTAINERS[container]
        total += -amount if verb in data._VERBS[-1] else amount
    return total


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    run_dir = Path(sys.argv[1]).resolve().parent
    orders = (folder / "stand-in.json" for folder in (run_dir, *run_dir.parents))
    asked = next((path for path in orders if path.exists()), None)
    fault = fault_of(asked)
    settings = spec["settings"]
    for environment in spec["environments"]:
        sys.path += [
            str(Path(spec["root"], "environments", name)) for name in (environment["name"], *environment["needs"])
        ]
    data = importlib.import_module(f"nightshift_{spec['environments'][0]['name']}.data")
    right = right_of(settings["optimizer"]["lr"], spec["train_seed"])
    steps = 0
    emit(event="ready")
    for line in sys.stdin:
        command = json.loads(line)
        if command["command"] == "train":
            most = min(settings["max_steps"] or math.inf, math.ceil(command["budget_seconds"] / STEP_SECONDS))
            most = 0 if fault == "no_step" else most
            outcome = "finished" if most == settings["max_steps"] else "budget"
            held_by = asked if fault == "hold" else None
            reward = right if fault == "rewards" else 0.5
            if fault == "holds_card":  # as if its memory were never released
                nvml = importlib.import_module("pynvml")  # a stand-in
                nvml.CARDS.write_text(json.dumps([{"used_gb": 40.0, "total_gb": 80.0}]))
            peak_gb = 2.0 if spec.get("device") == "cuda" else None
            steps = train(most, outcome, fault, held_by, Path(spec["metrics_path"]), reward, peak_gb)
        elif command["command"] == "load_final_weights":
            weights = Path(spec["weights_dir"]) / "model.safetensors"
            weights.parent.mkdir(exist_ok=True)
            weights.write_text(f"{steps} {right}")
            sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
            emit(event="weights", weights={"step": steps, "sha256": sha256})
        elif command["command"] == "complete":
            texts = []
            for (message,) in command["prompts"][: -1 if fault == "short_answers" else None]:
                question = message["content"]
                texts.append(f"#### {answer_to(question, data)}" if is_right(question, right) else "#### no")
            for at in range(0, len(texts), 250):
                completions = [{"text": text, "num_tokens": 4, "truncated": False} for text in texts[at : at + 250]]
                emit(event="completions", completions=completions)
            emit(event="completed")


def train(
    num_steps: float,
    outcome: str,
    fault: str | None,
    held_by: Path | None,
    metrics_path: Path,
    reward: float,
    peak_gb: float | None,
) -> int:
    """So many "steps", of STEP_SECONDS by its own count: other load makes them slower and not fewer."""
    step = 0
    with metrics_path.open("a", buffering=1) as metrics:  # line by line, as the real one: it may be ended
        while step < num_steps or (held_by is not None and held_by.exists()):
            time.sleep(STEP_SECONDS)
            step += 1
            row = {"step": step, "time": step * STEP_SECONDS, "reward_mean": reward, "reward_std": 0.4}
            if fault in ("no_gradient", "late_no_gradient"):
                lacks = fault == "no_gradient" or step > 3
                row |= {"grad_norm": 0.0, "equal_share": 1.0, "all_wrong_share": 1.0} if lacks else {"grad_norm": 0.3}
            metrics.write(json.dumps(row) + "\n")
            emit(event="step", row=row)
            if select.select([0], [], [], 0)[0]:
                outcome = "budget"
                break
            if fault == "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "error":
                emit(event="error", cause="loss is nan at step 1 with lr 1")
                sys.exit(1)
    seconds = step * STEP_SECONDS
    training = {"outcome": outcome, "num_steps": step, "training_seconds": seconds, "reward_mean": reward}
    training |= {"peak_memory_gb": peak_gb}
    emit(event="trained", training=training)
    return step


if __name__ == "__main__":
    main()

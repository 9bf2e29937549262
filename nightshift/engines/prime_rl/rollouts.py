"""A few of the rollouts that prime-rl trained on, for people to read.

One line of `rollouts/step_N/train/all/traces.jsonl` is an episode (verifiers/v1/trace.py, episode.py): tens of
kB with its token ids and log probabilities, and whatever text the policy wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nightshift.files import open_regular, write_atomically

NUM_ROLLOUTS = 12  # that a run keeps for people to read
MAX_TEXT = 4000  # characters of a problem or completion that are kept
_MAX_READ = 64 << 20  # bytes of a file that are looked at: some six hundred rollouts of 2,048 tokens
# As verifiers: limits of the framework; else the last answer's finish reason decides.
_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")


def rollout_files(rollouts_dir: Path) -> Iterator[Path]:
    """Of all steps, in no order; they grow while any rollout is finished."""
    return rollouts_dir.glob("step_*/train/all/traces.jsonl")


def num_rollouts(rollouts_dir: Path) -> int:
    """Finished so far, also those that failed."""
    total = 0
    for path in rollout_files(rollouts_dir):
        with open_regular(path) as file:
            total += sum(1 for _ in file)
    return total


def keep_rollouts(rollouts_dir: Path, path: Path) -> None:
    """Write a few of them to `path`, a line each, if there are any."""
    if rollouts := sample_rollouts(rollouts_dir, NUM_ROLLOUTS):
        write_atomically(path, "".join(json.dumps(rollout) + "\n" for rollout in rollouts).encode(), sync=False)


def sample_rollouts(rollouts_dir: Path, num: int) -> list[dict[str, Any]]:
    """Up to `num` rollouts as {step, problem, completion, reward, truncated}, of the last steps first.

    Evenly spaced over a step, so that they are not all of one problem. Text is cut to MAX_TEXT characters and
    holds no control characters but newline and tab; `reward` is None where scoring failed. Lines that are torn
    or no episode are left out.
    """
    samples: list[dict[str, Any]] = []
    files = rollout_files(rollouts_dir)
    steps = {int(name[1]): path for path in files if (name := re.fullmatch(r"step_(\d+)", path.parents[2].name))}
    for step in sorted(steps, reverse=True):
        with open_regular(steps[step]) as file:
            lines = file.read(_MAX_READ).splitlines()
        wanted = min(num - len(samples), len(lines))
        found = (_rollout(lines[index * len(lines) // wanted]) for index in range(wanted))
        samples += ({"step": step, **rollout} for rollout in found if rollout is not None)
        if len(samples) >= num:
            break
    return samples


def _rollout(line: bytes) -> dict[str, Any] | None:
    try:
        trace = json.loads(line)["traces"][0]  # msgspec refuses lone surrogates, which policies write
        messages = [node["message"] for node in trace["nodes"]]
        problem = next(m for m in messages if m["role"] == "user")
        completion: dict[str, Any] = next((m for m in reversed(messages) if m["role"] == "assistant"), {})
        return {
            "problem": _text(problem.get("content")),
            "completion": _text(completion.get("content")),
            "reward": _reward(trace.get("rewards") or {}),
            "truncated": _truncated(trace),
        }
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError):
        return None


def _reward(rewards: dict[str, Any]) -> float | None:
    """Sum of score times weight; None where nothing was scored."""
    values = [float(r["score"]) * float(r["weight"]) for r in rewards.values() if r is not None]
    return sum(values) if values else None


def _truncated(trace: dict[str, Any]) -> bool:
    calls = [call for call in trace.get("calls") or [] if call.get("error") is None]
    return trace.get("stop_condition") in _LIMITS or bool(calls and calls[-1].get("finish_reason") == "length")


def _text(content: Any) -> str:
    if isinstance(content, list):  # parts, of which only text is shown
        content = " ".join(str(part.get("text", "")) for part in content)
    text = str(content or "")[:MAX_TEXT].encode("utf-8", "replace").decode()  # no lone surrogates
    return "".join(c if c in "\n\t" or c.isprintable() else " " for c in text)

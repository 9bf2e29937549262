"""What prime-rl's trainer and orchestrator append to their metrics files, read while they write, as Steps.

Keys and their meaning: prime_rl/trainer/rl/train.py and prime_rl/orchestrator/{metrics,orchestrator}.py at the
pinned commit. The trainer writes five rows a step (perf, optim, tensor statistics, time, disk), the orchestrator
one; a row of the trainer may come before the orchestrator's of the same step. No key that is read here is in rows of
both.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from nightshift.campaign.metrics import Step
from nightshift.files import nesting_limit, open_regular, parse_json, write_atomically

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
    """Write up to NUM_ROLLOUTS rollouts, of the last steps first, to `path`: a line each, if there are any.

    A line is {step, problem, completion, reward, truncated}. Rollouts are evenly spaced over a step, so that they are
    not all of one problem. Text is cut to MAX_TEXT characters and contains no control characters but newline and tab;
    `reward` is None where scoring failed. Lines that are torn or no episode are left out.
    """
    rollouts: list[dict[str, Any]] = []
    files = rollout_files(rollouts_dir)
    steps = {int(name[1]): path for path in files if (name := re.fullmatch(r"step_(\d+)", path.parents[2].name))}
    for step in sorted(steps, reverse=True):
        with open_regular(steps[step]) as file:
            lines = file.read(_MAX_READ).splitlines()
        wanted = min(NUM_ROLLOUTS - len(rollouts), len(lines))
        found = (_rollout(lines[index * len(lines) // wanted]) for index in range(wanted))
        rollouts += ({"step": step, **rollout} for rollout in found if rollout is not None)
        if len(rollouts) == NUM_ROLLOUTS:
            break
    if rollouts:
        write_atomically(path, "".join(json.dumps(rollout) + "\n" for rollout in rollouts).encode(), sync=False)


def _rollout(line: bytes) -> dict[str, Any] | None:
    try:
        with nesting_limit():
            trace = json.loads(line)["traces"][0]  # msgspec refuses lone surrogates, which policies write
        messages = [node["message"] for node in trace["nodes"]]
        problem = next(m for m in messages if m["role"] == "user")
        completion: dict[str, Any] = next((m for m in reversed(messages) if m["role"] == "assistant"), {})
        rewards = [
            float(r["score"]) * float(r["weight"]) for r in (trace.get("rewards") or {}).values() if r is not None
        ]
        calls = [call for call in trace.get("calls") or [] if call.get("error") is None]
        is_cut = bool(calls and calls[-1].get("finish_reason") == "length")
        return {
            "problem": _text(problem.get("content")),
            "completion": _text(completion.get("content")),
            "reward": sum(rewards) if rewards else None,
            "truncated": trace.get("stop_condition") in _LIMITS or is_cut,
        }
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
        return None


def _text(content: Any) -> str:
    if isinstance(content, list):  # parts, of which only text is shown
        content = " ".join(str(part.get("text", "")) for part in content)
    text = str(content or "")[:MAX_TEXT].encode("utf-8", "replace").decode()  # no lone surrogates
    return "".join(c if c in "\n\t" or c.isprintable() else " " for c in text)


# Raw key -> field of Step, or a name of our own, with _. reward_std has no raw key: prime-rl writes mean, extremes and
# percentiles only. A value that is no finite number has no key either.
_FIELDS = {
    "optim/lr": "lr",  # of the next step
    "optim/grad_norm": "grad_norm",
    "loss/mean": "loss",
    "entropy/all/mean": "entropy",
    "mismatch_kl/all/mean": "kl",  # of the trainer's probabilities from the server's, per token
    "is_masked/mean": "masked_share",
    "time/forward_backward": "train_seconds",  # optimizer step included
    "time/broadcast_weights": "broadcast_seconds",
    "time/wait_for_batch": "wait_for_rollouts_seconds",
    # The orchestrator's. `all` holds every rollout of the step; `effective` only what the zero-advantage filter left.
    "train/agg/all/agent/reward/mean": "reward_mean",
    "train/agg/all/agent/reward/min": "_reward_min",
    "train/agg/all/agent/solved_all": "all_right_share",
    "train/agg/all/agent/solved_none": "all_wrong_share",
    "train/agg/all/agent/num_output_tokens/mean": "completion_tokens_mean",
    "train/agg/all/agent/is_truncated/mean": "truncated_share",
    "train/agg/all/has_error/mean": "error_share",  # of episodes: also those that left no rollout
    "train/agg/all/agent/num_branches/mean": "branches_mean",
    "off_policy/mean": "off_policy_mean",
    "time/wait_for_policy": "wait_for_policy_seconds",
    "progress/rollouts": "_num_rollouts",
}
_REWARD = re.compile("train/(.+)/all/(.+)/reward/mean")  # of one source's seat; agg is all sources
_SERVER_ERRORS = re.compile("train/agg/all/.+/error/ProviderError")  # of one seat; rollouts are counted of all seats


class MetricsTail:
    """Reads appended rows only, so that it can be polled every second of a run.

    A step is complete, and counted, when the trainer's rows for it exist: its policy is published then.
    """

    def __init__(
        self, *paths: Path, is_group_relative: bool = False, seats: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`paths`: the trainer's and the orchestrator's file, or one that both write. They may not exist yet.

        `is_group_relative`: an advantage is the reward less the mean of its group, and nothing else. `seats`: whose
        rollouts are counted, by the name of the source; without one `agent`. Where the seats of sources differ, a
        figure is the mean over the sources.
        """
        names = {*seats.values()} or {"agent"}
        self._seats, self._sources = seats, {"agg": names.pop()} if len(names) == 1 else seats
        self._is_group_relative = is_group_relative
        self._offsets = dict.fromkeys(paths, 0)
        self._rows: dict[int, dict[str, Any]] = {}

    def poll(self) -> bool:
        """Take in what was appended since the last call; True if there was any whole row."""
        rows = [row for path in self._offsets for row in self._new_rows(path)]
        for row in rows:
            self._take(row)
        return bool(rows)

    @property
    def num_steps(self) -> int:
        """Complete steps so far."""
        return len(self._complete())

    def steps(self, began: float, last_step: int | None = None) -> list[Step]:
        """Complete steps in order, up to `last_step`. `began`: when training began, in seconds of time.time()."""
        steps, before = list[Step](), began
        for number in self._complete(last_step):
            ended = self._rows[number]["time"]
            steps.append(self._step(number, began, None if ended is None else ended - before))
            before = before if ended is None else ended
        return steps

    def is_whole(self, number: int) -> bool:
        """True once trainer and orchestrator have written all of a step."""
        return self._rows.get(number, {}).keys() >= {"time", "_num_rollouts"}

    def reward_mean(self, last_step: int | None = None) -> float | None:
        """Mean reward over all rollouts of the complete steps; None before the first."""
        total, count = 0.0, 0.0
        for number in self._complete(last_step):
            reward, num_rollouts = map(self._rows[number].get, ("reward_mean", "_num_rollouts"))
            if reward is not None and num_rollouts:
                total += reward * num_rollouts
                count += num_rollouts
        return total / count if count else None

    def not_finite_step(self) -> int | None:
        """The first complete step whose loss was NaN or infinite: prime-rl always has one and leaves it out then."""
        return next((n for n in self._complete() if self._rows[n].get("loss") is None), None)

    def _complete(self, last_step: int | None = None) -> list[int]:
        """Numbers of the complete steps. The row with the times is the last that is read from the trainer."""
        return sorted(n for n, row in self._rows.items() if "time" in row and (last_step is None or n <= last_step))

    def _new_rows(self, path: Path) -> Iterator[dict[str, Any]]:
        try:
            with open_regular(path) as file:
                file.seek(self._offsets[path])
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]  # the rest is still being written, or was cut by a kill
        self._offsets[path] += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):
                yield parse_json(line, dict[str, Any])

    def _take(self, row: dict[str, Any]) -> None:
        step = _number(row.get("step"))
        if step is None or step != int(step):
            return
        values: dict[str, Any] = {}
        for key, name in _FIELDS.items():
            paths = {key.replace("agg/all/agent", f"{source}/all/{seat}") for source, seat in self._sources.items()}
            if paths := {path for path in paths if path in row}:
                numbers = [number for path in paths if (number := _number(row[path])) is not None]
                is_whole = len(numbers) == len(paths)
                values[name] = None if not is_whole else min(numbers) if name == "_reward_min" else fmean(numbers)
        if errors := [_number(row[key]) or 0.0 for key in row if _SERVER_ERRORS.fullmatch(key)]:
            values["_server_errors"] = sum(errors)
        if "train_seconds" in values:
            values["time"] = _number(row.get("time"))
        of_seats = {(match[1], match[2]): _number(row[key]) for key in row if (match := _REWARD.fullmatch(key))}
        of_sources = {name: value for (name, seat), value in of_seats.items() if seat == self._seats.get(name, "agent")}
        rewards = {name: value for name, value in of_sources.items() if name != "agg" and value is not None}
        if len(rewards) > 1:
            values["rewards"] = rewards
        self._rows.setdefault(int(step), {}).update(values)

    def _step(self, number: int, began: float, seconds: float | None) -> Step:
        """Return a step. `seconds`: from the end of the step before it, or from the beginning of the training."""
        values = dict(self._rows[number])
        # As the trl engine counts: completion tokens of all rollouts, a second of the whole step. The orchestrator's
        # time/step is next to 0 where two batches are full at once, and perf/throughput counts padding, too.
        tokens, num_rollouts = values.get("completion_tokens_mean"), values.pop("_num_rollouts", None)
        if tokens is not None and num_rollouts and seconds is not None and seconds > 0:
            values["tokens_per_second"] = tokens * num_rollouts / seconds
        if (errors := values.pop("_server_errors", None)) is not None and num_rollouts:
            values["server_error_share"] = errors / num_rollouts
        wait = values.get("wait_for_rollouts_seconds")
        if wait is not None and seconds is not None:  # the trainer of the first step waits since before the training
            values["wait_for_rollouts_seconds"] = min(wait, max(seconds, 0.0))
        if values["time"] is not None:
            values["time"] -= began
        least = values.pop("_reward_min", None)
        right, wrong = values.get("all_right_share"), values.get("all_wrong_share")
        # prime-rl calls a group all wrong if its rewards sum to 0. It does not count groups that are equal in between.
        if self._is_group_relative and least is not None and least >= 0 and right is not None and wrong is not None:
            values["equal_share"] = right + wrong
        return Step(step=number, **values)


def _number(value: Any) -> float | None:
    """A finite number; an integer may be beyond any float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None

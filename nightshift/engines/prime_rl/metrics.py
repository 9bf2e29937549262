"""Read the metrics files of prime-rl's trainer and orchestrator as Steps while they grow, and keep sample rollouts.

The keys are in prime_rl/trainer/rl/train.py and prime_rl/orchestrator/{metrics,orchestrator}.py at the pinned commit.
The trainer writes five rows a step (perf, optim, tensor statistics, time, disk), the orchestrator one, in any order. No
key that is read here is in rows of both. prime-rl leaves out values that are not finite.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from nightshift.campaign.metrics import Step
from nightshift.files import nesting_limit, open_regular, parse_json, write_atomically

NUM_ROLLOUTS = 12  # kept of a run
MAX_TEXT = 4000  # characters kept of a problem or completion
_MAX_READ = 64 << 20  # bytes of a file: some six hundred rollouts of 2,048 tokens
# verifiers' stop conditions of a truncated rollout; otherwise the finish reason of the last answer decides.
_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")


def rollout_files(rollouts_dir: Path) -> Iterator[Path]:
    """Yield the files of all steps in no order. They grow with each finished rollout."""
    return rollouts_dir.glob("step_*/train/all/traces.jsonl")


def num_rollouts(rollouts_dir: Path) -> int:
    """Return the number of finished and failed rollouts."""
    total = 0
    for path in rollout_files(rollouts_dir):
        with open_regular(path) as file:
            total += sum(1 for _ in file)
    return total


def keep_rollouts(rollouts_dir: Path, path: Path) -> None:
    """Write up to NUM_ROLLOUTS rollouts of the last steps to `path`, if there are any.

    A line is {step, problem, completion, reward, truncated}; `reward` is None if scoring failed. Rollouts are evenly
    spaced over a step to cover several problems. Incomplete lines are left out.
    """
    rollouts: list[dict[str, Any]] = []
    files = rollout_files(rollouts_dir)
    steps = {int(name[1]): path for path in files if (name := re.fullmatch(r"step_(\d+)", path.parents[2].name))}
    for step in sorted(steps, reverse=True):
        with open_regular(steps[step]) as file:
            lines = file.read(_MAX_READ).splitlines()
        num = min(NUM_ROLLOUTS - len(rollouts), len(lines))
        samples = (_rollout(lines[index * len(lines) // num]) for index in range(num))
        rollouts += ({"step": step, **sample} for sample in samples if sample is not None)
        if len(rollouts) == NUM_ROLLOUTS:
            break
    if rollouts:
        write_atomically(path, "".join(json.dumps(rollout) + "\n" for rollout in rollouts).encode(), sync=False)


def _rollout(line: bytes) -> dict[str, Any] | None:
    try:
        with nesting_limit():
            trace = json.loads(line)["traces"][0]  # msgspec refuses the lone surrogates that policies write
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
    if isinstance(content, list):  # parts of a message
        content = " ".join(str(part.get("text", "")) for part in content)
    text = str(content or "")[:MAX_TEXT].encode("utf-8", "replace").decode()  # no lone surrogates
    return "".join(c if c in "\n\t" or c.isprintable() else " " for c in text)


# Raw key -> field of Step, or a name with _ that only this module uses. reward_std has no raw key.
_FIELDS = {
    "optim/lr": "lr",  # of the next step
    "optim/grad_norm": "grad_norm",
    "loss/mean": "loss",
    "entropy/all/mean": "entropy",
    "mismatch_kl/all/mean": "kl",  # between trainer and server, per token
    "is_masked/mean": "masked_share",
    "time/forward_backward": "train_seconds",  # with the optimizer step
    "time/broadcast_weights": "broadcast_seconds",
    "time/wait_for_batch": "wait_for_rollouts_seconds",
    # Of the orchestrator. `all` is over every rollout of the step, before the zero-advantage filter.
    "train/agg/all/agent/reward/mean": "reward_mean",
    "train/agg/all/agent/reward/min": "_reward_min",
    "train/agg/all/agent/solved_all": "all_right_share",
    "train/agg/all/agent/solved_none": "all_wrong_share",
    "train/agg/all/agent/num_output_tokens/mean": "completion_tokens_mean",
    "train/agg/all/agent/is_truncated/mean": "truncated_share",
    "train/agg/all/has_error/mean": "error_share",  # of episodes, also of those without a rollout
    "train/agg/all/agent/num_branches/mean": "branches_mean",
    "off_policy/mean": "off_policy_mean",
    "time/wait_for_policy": "wait_for_policy_seconds",
    "progress/rollouts": "_num_rollouts",
}
_REWARD = re.compile("train/(.+)/all/(.+)/reward/mean")  # of a source and a seat; agg is all sources
_SERVER_ERRORS = re.compile("train/agg/all/.+/error/ProviderError")  # of a seat


class MetricsTail:
    """The complete steps of a run so far. `poll` reads only rows that were appended since the last call.

    A step is complete when the trainer has written its rows: it has published the policy then.
    """

    def __init__(
        self, *paths: Path, is_group_relative: bool = False, seats: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`paths`: the files of the trainer and the orchestrator, which may not exist yet.

        Args:
            is_group_relative: an advantage is the reward minus the mean of its group.
            seats: by source, the seat whose rollouts count, by default `agent`. If the seats of sources differ, a value
                is the mean over the sources.
        """
        names = {*seats.values()} or {"agent"}
        self._seats, self._sources = seats, {"agg": names.pop()} if len(names) == 1 else seats
        self._is_group_relative = is_group_relative
        self._offsets = dict.fromkeys(paths, 0)
        self._rows: dict[int, dict[str, Any]] = {}

    def poll(self) -> bool:
        """Read new rows. Returns whether there were any."""
        rows = [row for path in self._offsets for row in self._new_rows(path)]
        for row in rows:
            self._add(row)
        return bool(rows)

    @property
    def num_steps(self) -> int:
        """The number of complete steps."""
        return len(self._complete())

    def steps(self, began: float, last_step: int | None = None) -> list[Step]:
        """Return the complete steps up to `last_step`. `began`: the start of the training, by time.time()."""
        steps, before = list[Step](), began
        for number in self._complete(last_step):
            ended = self._rows[number]["time"]
            steps.append(self._step(number, began, None if ended is None else ended - before))
            before = before if ended is None else ended
        return steps

    def is_whole(self, number: int) -> bool:
        """Return whether trainer and orchestrator have written all rows of a step."""
        return self._rows.get(number, {}).keys() >= {"time", "_num_rollouts"}

    def reward_mean(self, last_step: int | None = None) -> float | None:
        """Return the mean reward over all rollouts of the complete steps; None without one."""
        total, count = 0.0, 0.0
        for number in self._complete(last_step):
            reward, num_rollouts = map(self._rows[number].get, ("reward_mean", "_num_rollouts"))
            if reward is not None and num_rollouts:
                total += reward * num_rollouts
                count += num_rollouts
        return total / count if count else None

    def not_finite_step(self) -> int | None:
        """Return the first complete step without a loss, which was NaN or infinite; None if there is none."""
        return next((n for n in self._complete() if self._rows[n].get("loss") is None), None)

    def _complete(self, last_step: int | None = None) -> list[int]:
        """Return the numbers of the complete steps. The row with the times is the last that the trainer writes."""
        return sorted(n for n, row in self._rows.items() if "time" in row and (last_step is None or n <= last_step))

    def _new_rows(self, path: Path) -> Iterator[dict[str, float]]:
        try:
            with open_regular(path) as file:
                file.seek(self._offsets[path])
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        self._offsets[path] += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError, OverflowError):
                row = parse_json(line, dict[str, Any])
                yield {key: float(value) for key, value in row.items() if type(value) in (int, float)}

    def _add(self, row: dict[str, float]) -> None:
        if not (step := row.get("step", math.nan)).is_integer():
            return
        values: dict[str, Any] = {}
        for key, name in _FIELDS.items():
            paths = {key.replace("agg/all/agent", f"{source}/all/{seat}") for source, seat in self._sources.items()}
            if numbers := [row[path] for path in paths if path in row]:
                values[name] = min(numbers) if name == "_reward_min" else fmean(numbers)
        if errors := [row[key] for key in row if _SERVER_ERRORS.fullmatch(key)]:
            values["_server_errors"] = sum(errors)
        if "train_seconds" in values:
            values["time"] = row.get("time")
        matches = [(match, row[key]) for key in row if (match := _REWARD.fullmatch(key)) and match[1] != "agg"]
        rewards = {match[1]: reward for match, reward in matches if match[2] == self._seats.get(match[1], "agent")}
        if len(rewards) > 1:
            values["rewards"] = rewards
        self._rows.setdefault(int(step), {}).update(values)

    def _step(self, number: int, began: float, seconds: float | None) -> Step:
        """Return a step. `seconds`: since the end of the previous step, or the beginning of the training."""
        values = dict(self._rows[number])
        # As in the trl engine: completion tokens of all rollouts per second of the whole step. The orchestrator's
        # time/step is near 0 if two batches are full at once, and perf/throughput includes padding.
        tokens, num_rollouts = values.get("completion_tokens_mean"), values.pop("_num_rollouts", None)
        if tokens is not None and num_rollouts and seconds is not None and seconds > 0:
            values["tokens_per_second"] = tokens * num_rollouts / seconds
        if (errors := values.pop("_server_errors", None)) is not None and num_rollouts:
            values["server_error_share"] = errors / num_rollouts
        wait = values.get("wait_for_rollouts_seconds")
        if wait is not None and seconds is not None:  # the first wait begins before the training
            values["wait_for_rollouts_seconds"] = min(wait, max(seconds, 0.0))
        if values["time"] is not None:
            values["time"] -= began
        least = values.pop("_reward_min", None)
        right, wrong = values.get("all_right_share"), values.get("all_wrong_share")
        # prime-rl calls a group all wrong if its rewards sum to 0, and does not count other groups of equal rewards.
        if self._is_group_relative and least is not None and least >= 0 and right is not None and wrong is not None:
            values["equal_share"] = right + wrong
        return Step(step=number, **values)

"""Read the metrics files of prime-rl's trainer and orchestrator as Steps while they grow, and keep sample rollouts.

The keys are in prime_rl/trainer/rl/train.py and prime_rl/orchestrator/{metrics,orchestrator}.py at the pinned commit.
The trainer writes five rows a step, the orchestrator one, in any order. No key that is read here is in rows of both.
prime-rl leaves out values that are not finite.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from nightshift.campaign.metrics import Step
from nightshift.files import nesting_limit, open_regular, parse_json, write_atomically

Row = dict[str, Any]  # values by name
NUM_ROLLOUTS, MAX_TEXT = 12, 4000  # kept of a run, and characters kept of a problem or completion
_MAX_READ = 64 << 20  # bytes of a file: some six hundred rollouts of 2,048 tokens
# verifiers' stop conditions of a truncated rollout; otherwise the finish reason of the last answer decides.
_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")


def rollout_files(rollouts_dir: Path) -> Iterator[Path]:
    """Yield the files of all steps in no order, which grow with each finished rollout."""
    return rollouts_dir.glob("step_[0-9]*/train/all/traces.jsonl")


def num_rollouts(rollouts_dir: Path) -> int:
    """Return the number of finished and failed rollouts."""
    return sum(path.read_bytes().count(b"\n") for path in rollout_files(rollouts_dir))


def keep_rollouts(rollouts_dir: Path, path: Path) -> None:
    """Write up to NUM_ROLLOUTS rollouts of the last steps to `path` as lines of JSON (`Sample`), if there are any.
    Rollouts are evenly spaced over a step to cover several problems."""
    rollouts: list[Row] = []
    names = {file.parents[2].name.removeprefix("step_"): file for file in rollout_files(rollouts_dir)}
    steps = {int(name): file for name, file in names.items() if name.isdecimal()}
    for step in sorted(steps, reverse=True):
        with open_regular(steps[step]) as file:
            lines = file.read(_MAX_READ).splitlines()
        num = min(NUM_ROLLOUTS - len(rollouts), len(lines))
        for index in range(num):
            with suppress(ValueError, LookupError, TypeError, AttributeError, StopIteration):
                rollouts.append({"step": step, **_rollout(lines[index * len(lines) // num])})
        if len(rollouts) == NUM_ROLLOUTS:
            break
    if rollouts:
        write_atomically(path, "".join(json.dumps(rollout) + "\n" for rollout in rollouts).encode(), sync=False)


def _rollout(line: bytes) -> Row:
    with nesting_limit():
        trace = json.loads(line)["traces"][0]  # msgspec refuses the lone surrogates that policies write
    messages = [node["message"] for node in trace["nodes"]]
    problem = next(m for m in messages if m["role"] == "user")
    completion: Row = next((m for m in reversed(messages) if m["role"] == "assistant"), {})
    rewards = [float(r["score"]) * float(r["weight"]) for r in (trace.get("rewards") or {}).values() if r is not None]
    calls = trace.get("calls") or [{}]
    return {
        "problem": _text(problem.get("content")),
        "completion": _text(completion.get("content")),
        "reward": sum(rewards) if rewards else None,
        "truncated": trace.get("stop_condition") in _LIMITS or calls[-1].get("finish_reason") == "length",
    }


def _text(content: Any) -> str:
    if isinstance(content, list):  # parts of a message
        content = " ".join(str(part.get("text", "")) for part in content)
    text = str(content or "")[:MAX_TEXT]
    return "".join(c if c in "\n\t" or c.isprintable() else " " for c in text)  # also no lone surrogates


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
_SERVER_ERRORS = re.compile("train/agg/all/.+/error/ProviderError")  # of a seat


class MetricsTail:
    """The complete steps of a run so far: the trainer has written their rows, and published the policy.

    `last_step`: later steps are left out.
    """

    def __init__(self, *paths: Path, seats: Mapping[str, str], is_group_relative: bool = False) -> None:
        """`paths`: the files of the trainer and the orchestrator, which may not exist yet.

        Args:
            seats: by source, the seat whose rollouts count. If they differ, a value is the mean over the sources.
            is_group_relative: an advantage is the reward minus the mean of its group.
        """
        self._seats, self._is_group_relative = seats, is_group_relative
        names = {*seats.values()}
        sources = {"agg": names.pop()} if len(names) == 1 else seats
        self._keys = {
            name: {key.replace("/agg/all/agent/", f"/{source}/all/{seat}/") for source, seat in sources.items()}
            for key, name in _FIELDS.items()
        }
        self._offsets, self.last_step = dict.fromkeys(paths, 0), math.inf
        self._rows: dict[int, Row] = {}

    def poll(self) -> None:
        """Read new rows."""
        for path, offset in self._offsets.items():
            data = b""
            with suppress(FileNotFoundError), open_regular(path) as file:
                file.seek(offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
            self._offsets[path] += len(whole)
            for line in whole.splitlines():
                with suppress(ValueError, OverflowError):
                    row = parse_json(line, Row)
                    self._add({key: float(value) for key, value in row.items() if type(value) in (int, float)})

    @property
    def num_steps(self) -> int:
        """The number of complete steps."""
        return len(self._complete())

    def steps(self, began: float) -> list[Step]:
        """Return the complete steps. `began`: the start of the training, by time.time()."""
        steps, before = list[Step](), began
        for number, row in self._complete().items():
            steps.append(Step(step=number, **self._values(row, began, row["time"] - before)))
            before = row["time"]
        return steps

    def is_whole(self, number: int) -> bool:
        """Return whether trainer and orchestrator have written all rows of a step."""
        return self._rows.get(number, {}).keys() >= {"time", "_num_rollouts"}

    def reward_mean(self) -> float | None:
        """Return the mean reward over all rollouts of the complete steps; None without one."""
        rows = [row for row in self._complete().values() if row.keys() >= {"reward_mean", "_num_rollouts"}]
        counts = [row["_num_rollouts"] for row in rows]
        return fmean([row["reward_mean"] for row in rows], counts) if any(counts) else None

    def not_finite_step(self) -> int | None:
        """Return the first complete step without a loss, which was NaN or infinite; None if there is none."""
        return next((number for number, row in self._complete().items() if row.get("loss") is None), None)

    def _complete(self) -> dict[int, Row]:
        """Return the complete steps by number. The row with the times is the last that the trainer writes."""
        return {number: row for number, row in sorted(self._rows.items()) if "time" in row and number <= self.last_step}

    def _add(self, row: dict[str, float]) -> None:
        if not (step := row.get("step", math.nan)).is_integer():
            return
        measured = {name: [row[key] for key in keys if key in row] for name, keys in self._keys.items()}
        values: Row = {name: fmean(numbers) for name, numbers in measured.items() if numbers}
        if errors := [row[key] for key in row if _SERVER_ERRORS.fullmatch(key)]:
            values["_server_errors"] = sum(errors)
        if "train_seconds" in values and "time" in row:
            values["time"] = row["time"]
        keys = {source: f"train/{source}/all/{seat}/reward/mean" for source, seat in self._seats.items()}
        rewards = {source: row[key] for source, key in keys.items() if key in row}
        if len(rewards) > 1:
            values["rewards"] = rewards
        self._rows.setdefault(int(step), {}).update(values)

    def _values(self, row: Row, began: float, seconds: float) -> Row:
        """Return the fields of a step. `seconds`: since the end of the previous step, or the start of the training."""
        values = {name: value for name, value in row.items() if name[0] != "_"}
        num_rollouts, least = row.get("_num_rollouts"), row.get("_reward_min")
        # As in the trl engine: completion tokens of all rollouts per second of the whole step. The orchestrator's
        # time/step is near 0 if two batches are full at once, and perf/throughput includes padding.
        tokens = row.get("completion_tokens_mean")
        if tokens is not None and num_rollouts and seconds > 0:
            values["tokens_per_second"] = tokens * num_rollouts / seconds
        if num_rollouts and "_server_errors" in row:
            values["server_error_share"] = row["_server_errors"] / num_rollouts
        if "wait_for_rollouts_seconds" in row:  # the first wait begins before the training
            values["wait_for_rollouts_seconds"] = min(row["wait_for_rollouts_seconds"], max(seconds, 0.0))
        values["time"] = row["time"] - began
        # prime-rl calls a group all wrong if its rewards sum to 0, and does not count other groups of equal rewards.
        shares = [row[name] for name in ("all_right_share", "all_wrong_share") if name in row]
        if self._is_group_relative and least is not None and least >= 0 and len(shares) == 2:
            values["equal_share"] = sum(shares)
        return values

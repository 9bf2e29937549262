"""What no single key can say: the rules between the keys of a train.toml.

They restate prime-rl's own validators as far as they concern open keys, and add what would waste a run:
groups without an advantage, warm-ups that never end, completions that do not fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nightshift.train_toml.locks import CURRICULUM
from nightshift.train_toml.values import Value, quoted, shorten, value_text


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason to refuse the file: `path` is the key to point at, `cause` and `fix` make the message."""

    path: tuple[str, ...]
    cause: str
    fix: str

    @classmethod
    def at(cls, path: tuple[str, ...], value: Any, cause: str, fix: str) -> Problem:
        """`key = value` followed by the cause; hostile names and values are escaped and shortened."""
        return cls(path, f"{_path_text(path)} = {value_text(value)} {cause}", fix)


def _path_text(path: tuple[str, ...]) -> str:
    segments = (part if re.fullmatch(r"[A-Za-z0-9_-]+", part, re.ASCII) else quoted(part) for part in path)
    return shorten(".".join(segments), 80)


class _View:
    """The effective values, and problems that point at the key the file writes."""

    def __init__(self, values: Mapping[str, Value], resolved: Mapping[str, Value]) -> None:
        self.values = values
        self.resolved = resolved

    def __getitem__(self, path: str) -> Any:
        return self.resolved.get(path)

    def problem(self, paths: tuple[str, ...], cause: str, fix: str) -> Problem:
        """Points at the first path that stands in the file; `cause` is a sentence of its own."""
        path = next((path for path in paths if path in self.values), paths[0])
        note = "" if path in self.values else " (the default)"
        text = "on" if self[path] == {} else value_text(self[path])
        return Problem(tuple(path.split(".")), f"{path} = {text}{note}: {cause}", fix)


def violations(values: Mapping[str, Value], resolved: Mapping[str, Value]) -> Iterator[Problem]:
    """Problems between keys, each of which is fine by itself."""
    view = _View(values, resolved)
    for check in (_batch, _concurrency, _lengths, _scheduler, _optimizer, _memory, _server, _curriculum):
        yield from check(view)


def _batch(view: _View) -> Iterator[Problem]:
    batch, group = "orchestrator.batch_size", "orchestrator.group_size"
    algo = view["orchestrator.algo.type"]
    if view[group] < 2 and algo in ("grpo", "max_rl"):
        cause = f"{algo} compares the rollouts of a group, so it needs 2 or more"
        yield view.problem((group,), cause, "Write group_size = 4 or more under [orchestrator]")
    if view[batch] is not None and view[batch] % view[group]:
        fewer = view[batch] // view[group] * view[group]
        fix = f"Write a multiple: batch_size = {fewer or view[group]}"
        yield view.problem((batch, group), f"groups of {view[group]} do not divide a batch of {view[batch]}", fix)


def _concurrency(view: _View) -> Iterator[Problem]:
    table = "orchestrator.concurrency"
    least, start, most = (f"{table}.{name}_inflight" for name in ("min", "initial", "max"))
    group = view["orchestrator.group_size"]
    for path in (start, most):
        if view[path] is not None and view[path] < group:
            cause = f"{view[path]} in flight cannot hold a group of {group}"
            yield view.problem((path, "orchestrator.group_size"), cause, f"Write {path} = {group} or more")
    for low, high in ((least, start), (least, most), (start, most)):
        if view[low] is not None and view[high] is not None and view[low] > view[high]:
            fix = f"Write {low.rpartition('.')[2]} = {view[high]} or less"
            yield view.problem((low, high), f"{view[low]} exceeds {high} = {view[high]}", fix)


def _lengths(view: _View) -> Iterator[Problem]:
    path = "orchestrator.train.sampling.max_completion_tokens"
    if view[path] is not None and view[path] >= view["seq_len"]:
        cause = f"a completion of {view[path]} leaves no room for its prompt in seq_len {view['seq_len']}"
        yield view.problem((path, "seq_len"), cause, "Lower max_completion_tokens or raise seq_len")


def _scheduler(view: _View) -> Iterator[Problem]:
    table = "trainer.scheduler"
    kind, steps = view[f"{table}.type"], view["max_steps"]
    if kind == "constant":
        return
    selector, warmup, decay = f"{table}.type", view[f"{table}.warmup_steps"], view[f"{table}.decay_steps"] or 0
    if view[f"{table}.min_lr"] > view["trainer.optim.lr"]:
        cause = f"min_lr exceeds lr = {value_text(view['trainer.optim.lr'])}"
        yield view.problem((f"{table}.min_lr", "trainer.optim.lr"), cause, "Lower min_lr")
    if kind == "linear" and warmup == 0 and decay == 0:
        yield view.problem((selector,), "warmup_steps and decay_steps are both 0", 'Write type = "constant"')
    elif steps is None and (kind == "cosine" or decay > 0):
        fix = "Write max_steps at the top of the file" + ("" if kind == "cosine" else ", or decay_steps = 0")
        yield view.problem((selector,), "the decay ends at max_steps, which is not set", fix)
    elif steps is not None and warmup >= steps:
        fix = f"Write warmup_steps = {steps - 1} or less, or raise max_steps"
        yield view.problem(
            (f"{table}.warmup_steps", "max_steps"),
            f"a warm-up of {warmup} steps never ends within max_steps {steps}",
            fix,
        )
    elif steps is not None and warmup + decay > steps:
        cause = f"warmup_steps {warmup} + decay_steps {decay} exceed max_steps {steps}"
        yield view.problem((f"{table}.decay_steps", f"{table}.warmup_steps", "max_steps"), cause, "Shorten one of them")


def _optimizer(view: _View) -> Iterator[Problem]:
    if view["trainer.optim.nesterov"] and view["trainer.optim.momentum"] == 0:
        cause = "Nesterov momentum, which is on, needs some"
        yield view.problem(("trainer.optim.momentum",), cause, "Write nesterov = false, or a momentum above 0")


def _memory(view: _View) -> Iterator[Problem]:
    model = "trainer.model"
    if view[f"{model}.ac"] is None and view[f"{model}.ac_offloading"] is not None:
        cause = "ac_offloading is on and would switch it on again"
        yield view.problem((f"{model}.ac",), cause, 'Write ac_offloading = "None" too')
    if view[f"{model}.fsdp_cpu_offload"]:
        if view[f"{model}.optim_cpu_offload"]:
            cause = "optim_cpu_offload is on as well"
            yield view.problem((f"{model}.fsdp_cpu_offload",), cause, "Write optim_cpu_offload = false")
        if view["trainer.optim.type"] == "muon":
            cause = "the muon optimizer cannot go with it"
            yield view.problem((f"{model}.fsdp_cpu_offload",), cause, "Write fsdp_cpu_offload = false")


def _server(view: _View) -> Iterator[Problem]:
    tokens, sequences = "inference.vllm.max_num_batched_tokens", "inference.vllm.max_num_seqs"
    if view[tokens] is not None and view[sequences] is not None and view[tokens] < view[sequences]:
        cause = f"less than one token for each of max_num_seqs {view[sequences]}"
        yield view.problem((tokens,), cause, "Raise it, or lower max_num_seqs")


def _curriculum(view: _View) -> Iterator[Problem]:
    pools, gates = f"{CURRICULUM}.sampler.pools", f"{CURRICULUM}.gates"
    names = [path for path, value in view.resolved.items() if value == {} and path.rpartition(".")[0] == pools]
    for pool in names:
        for leaf in ("threshold", "weight"):
            if view[f"{pool}.{leaf}"] is None:
                yield view.problem((pool,), f"the pool has no {leaf}", f"Write {leaf} under [{pool}]")
    thresholds = [view[f"{pool}.threshold"] for pool in names]
    if len(set(thresholds)) != len(thresholds):
        yield view.problem(
            (f"{names[-1]}.threshold",), "two pools have the same threshold", "Give each pool its own threshold"
        )
    if names and not any(view[f"{pool}.weight"] for pool in names):
        yield view.problem((f"{names[-1]}.weight",), "no pool has a weight above 0", "Give one pool a weight above 0")
    for gate in [path for path in view.resolved if path.rpartition(".")[0] == gates]:
        if view[f"{gate}.reject_min"] > view[f"{gate}.reject_max"]:
            cause = f"reject_min exceeds reject_max = {value_text(view[f'{gate}.reject_max'])}"
            yield view.problem((f"{gate}.reject_min", f"{gate}.reject_max"), cause, "Swap the two")

"""What no single key can say: the rules between the keys of a train.toml.

They restate prime-rl's own validators as far as they concern open keys, and add what would waste a run:
groups without an advantage, warm-ups that never end, completions that do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from nightshift.train_toml.locks import CURRICULUM
from nightshift.train_toml.values import Problem, Value, value_text


class _View:
    """The effective values; refuses with the key that the file writes."""

    def __init__(self, values: Mapping[str, Value], resolved: Mapping[str, Value]) -> None:
        self.values, self.resolved = values, resolved

    def __getitem__(self, path: str) -> Any:
        return self.resolved.get(path)

    def refuse(self, cause: str, fix: str, *paths: str) -> NoReturn:
        """Points at the first path that stands in the file; `cause` is a sentence of its own."""
        path = next((path for path in paths if path in self.values), paths[0])
        note = "" if path in self.values else " (the default)"
        text = "on" if self[path] == {} else value_text(self[path])
        raise Problem(f"{path} = {text}{note}: {cause}", fix, tuple(path.split(".")))


def check(values: Mapping[str, Value], resolved: Mapping[str, Value]) -> None:
    """Raises Problem for keys that do not go together, each of which is fine by itself."""
    view = _View(values, resolved)
    for rule in (_batch, _order, _lengths, _scheduler, _optimizer, _memory, _pools):
        rule(view)


def _batch(view: _View) -> None:
    batch, group = (f"orchestrator.{name}_size" for name in ("batch", "group"))
    algo, size, num = view["orchestrator.algo.type"], view[batch], view[group]
    if num < 2 and algo in ("grpo", "max_rl"):
        fix = "Write group_size = 4 or more under [orchestrator]"
        view.refuse(f"{algo} compares the rollouts of a group, so it needs 2 or more", fix, group)
    if size is not None and size % num:
        fix = f"Write a multiple: batch_size = {max(size // num, 1) * num}"
        view.refuse(f"groups of {num} do not divide a batch of {size}", fix, batch, group)


def _order(view: _View) -> None:
    """Pairs of keys of which the first may not exceed the second."""
    least, start, most = (f"orchestrator.concurrency.{name}_inflight" for name in ("min", "initial", "max"))
    gates = [path for path in view.resolved if path.rpartition(".")[0] == f"{CURRICULUM}.gates"]
    for low, high in (
        *((least, start), (least, most), (start, most)),
        *(("orchestrator.group_size", path) for path in (start, most)),  # a group is in flight as a whole
        ("trainer.scheduler.min_lr", "trainer.optim.lr"),
        ("inference.vllm.max_num_seqs", "inference.vllm.max_num_batched_tokens"),  # a token each, at least
        *((f"{gate}.reject_min", f"{gate}.reject_max") for gate in gates),
    ):
        if view[low] is not None and view[high] is not None and view[low] > view[high]:
            less, more = (path.rpartition(".")[2] for path in (low, high))
            cause = f"{less} {value_text(view[low])} exceeds {more} {value_text(view[high])}"
            view.refuse(cause, f"Lower {less} or raise {more}", low, high)


def _lengths(view: _View) -> None:
    path = "orchestrator.train.sampling.max_completion_tokens"
    if view[path] is not None and view[path] >= view["seq_len"]:
        cause = f"a completion of {view[path]} leaves no room for its prompt in seq_len {view['seq_len']}"
        view.refuse(cause, "Lower max_completion_tokens or raise seq_len", path, "seq_len")


def _scheduler(view: _View) -> None:
    selector, warmup_path, decay_path = (
        f"trainer.scheduler.{name}" for name in ("type", "warmup_steps", "decay_steps")
    )
    kind, steps = view[selector], view["max_steps"]
    if kind == "constant":
        return
    warmup, decay = view[warmup_path], view[decay_path] or 0
    if kind == "linear" and warmup == 0 and decay == 0:
        view.refuse("warmup_steps and decay_steps are both 0", 'Write type = "constant"', selector)
    if kind == "linear" and decay == 1:  # P/trainer/scheduler.py:49 decays over decay_steps - 1
        view.refuse("it would divide by zero at its start", "Write 0, or 2 or more", decay_path)
    if steps is None:
        if kind == "cosine" or decay > 0:
            fix = "Write max_steps at the top of the file" + ("" if kind == "cosine" else ", or decay_steps = 0")
            view.refuse("the decay ends at max_steps, which is not set", fix, selector)
    elif warmup >= steps:
        cause = f"a warm-up of {warmup} steps never ends within max_steps {steps}"
        view.refuse(cause, f"Write warmup_steps = {steps - 1} or less, or raise max_steps", warmup_path, "max_steps")
    elif warmup + decay > steps:
        cause = f"warmup_steps {warmup} + decay_steps {decay} exceed max_steps {steps}"
        view.refuse(cause, "Shorten one of them", decay_path, warmup_path, "max_steps")


def _optimizer(view: _View) -> None:
    if view["trainer.optim.nesterov"] and view["trainer.optim.momentum"] == 0:
        view.refuse("Nesterov needs some", "Write nesterov = false, or a momentum above 0", "trainer.optim.momentum")


def _memory(view: _View) -> None:
    """What the file leaves out the preset of memory makes fit."""
    ac, offload = "trainer.model.ac", "trainer.model.fsdp_cpu_offload"
    if view[ac] is None and view.values.get("trainer.model.ac_offloading") is not None:
        view.refuse("ac_offloading is on and would switch it on again", 'Write ac_offloading = "None" too', ac)
    if view[offload] and view.values.get("trainer.model.optim_cpu_offload"):
        view.refuse("optim_cpu_offload is on as well", "Write optim_cpu_offload = false", offload)
    if view[offload] and view["trainer.optim.type"] == "muon":
        view.refuse("the muon optimizer cannot go with it", "Write fsdp_cpu_offload = false", offload)


def _pools(view: _View) -> None:
    table = f"{CURRICULUM}.sampler.pools"
    pools = [path for path, value in view.resolved.items() if value == {} and path.rpartition(".")[0] == table]
    for pool in pools:
        for leaf in ("threshold", "weight"):
            if view[f"{pool}.{leaf}"] is None:
                view.refuse(f"the pool has no {leaf}", f"Write {leaf} under [{pool}]", pool)
    if len({view[f"{pool}.threshold"] for pool in pools}) != len(pools):
        view.refuse("two pools have the same threshold", "Give each its own", f"{pools[-1]}.threshold")
    if pools and not any(view[f"{pool}.weight"] for pool in pools):
        view.refuse("no pool has a weight above 0", "Give one pool a weight above 0", f"{pools[-1]}.weight")

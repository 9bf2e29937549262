"""TRL's GRPOTrainer as the trainer process uses it: prime-rl's meaning of every setting, one metrics row a step.

What differs from a bare GRPOTrainer, and why:
- sampling goes through sampler.py: `generate` costs more than the rest of a step;
- rollouts whose advantage is zero leave the batch before forward and backward, as in prime-rl;
- on a CPU log-probabilities go through log_probs.py, which leaves padding out;
- several environments are mixed by their ratio, as prime-rl's sources are, and examples drawn by difficulty pools;
- optimizer and schedule are those of optimizer.py;
- training ends at a moment, not at a step: an update that would begin after it does not happen.
"""

import itertools
import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from nightshift.engines.trl.log_probs import log_probs_and_entropies
from nightshift.engines.trl.optimizer import make_optimizer, make_scheduler
from nightshift.engines.trl.sampler import Sample, sample
from nightshift.evaluation.environment import Environment
from nightshift.evaluation.episode import Example

NUM_EACH = 7  # rollouts of each kind: best, worst, cut off
MAX_TEXT = 4_000  # characters of a problem or completion


class RolloutLog:
    """Keeps rollouts for people and agents to read: the last NUM_EACH best, worst and cut-off ones of a step."""

    def __init__(self) -> None:
        self._best, self._worst, self._cut = (deque[dict[str, Any]](maxlen=NUM_EACH) for _ in range(3))

    def look(
        self, step: int, problems: Sequence[str], texts: Sequence[str], rewards: Sequence[float], is_cut: Sequence[bool]
    ) -> None:
        """Of the batch of a step, lists of b each, keep the best rollout, the worst and one that was cut off."""
        order = sorted(range(len(rewards)), key=lambda i: rewards[i])
        whole, cut = ([i for i in order if is_cut[i] is way] for way in (False, True))
        for kept, found in ((self._best, whole[-1:]), (self._worst, whole[:1]), (self._cut, cut[:1])):
            kept.extend(
                {
                    "step": step,
                    "problem": problems[i][:MAX_TEXT],
                    "completion": texts[i][:MAX_TEXT],
                    "reward": rewards[i],
                    "truncated": is_cut[i],
                }
                for i in found
            )

    def write(self, path: Path) -> None:
        """A line each, in the order of the steps; none twice."""
        kept = sorted((*self._best, *self._worst, *self._cut), key=lambda sample: sample["step"])
        path.write_text("".join(f"{line}\n" for line in dict.fromkeys(map(json.dumps, kept))))


def training_set(environments: Sequence[Environment], ratio: Mapping[str, float]) -> list[tuple[Environment, Example]]:
    """All examples of one environment; of several as many in all, in their ratio (1 where nothing is said), over and
    again where that is more than there are."""
    sets = {one.name: (one, one.examples("train")) for one in environments}
    shares = {name: ratio.get(name, 1.0) for name in sets}
    total = sum(len(examples) for _, examples in sets.values()) / sum(shares.values())
    return [
        (environment, example)
        for name, (environment, examples) in sets.items()
        for example in itertools.islice(itertools.cycle(examples), max(round(total * shares[name]), 1))
    ]


class DifficultyPools:
    """prime-rl's difficulty_pool: an example is drawn by the weight of the pool that its last group's mean is in."""

    def __init__(self, pools: Mapping[str, Mapping[str, float]], num_examples: int, seed: int) -> None:
        """A pool's `threshold` is the highest mean reward in it; the last pool takes in what is above."""
        self._pools = sorted((pool["threshold"], pool["weight"]) for pool in pools.values())
        self._weights = [1.0] * num_examples  # of one that was never drawn, as in prime-rl
        self._rng = random.Random(seed)

    def draw(self, num: int) -> list[int]:
        """Indices of examples; one may come twice. ValueError where all are in pools of weight 0."""
        if not any(self._weights):
            raise ValueError("every example is in a difficulty pool of weight 0. Give each pool a weight, such as 0.05")
        return self._rng.choices(range(len(self._weights)), self._weights, k=num)

    def observe(self, index: int, reward_mean: float) -> None:
        """What a group of an example got."""
        weights = (weight for threshold, weight in self._pools if reward_mean <= threshold)
        self._weights[index] = next(weights, self._pools[-1][1])


Settings = Mapping[str, Any]

NO_LIMIT_STEPS = 10**9  # max_steps is unset: the budget ends the run


class _BudgetEnd(Exception):
    """Unwinds the trainer between two tokens of generation, or between two passes of an update, which is dropped."""


class Trainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO on one device for a number of seconds; `train_for` is the only entry."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        environments: Sequence[Environment],
        spec: Settings,
        send: Callable[[Settings], None],
    ) -> None:
        """Of `spec` it reads settings, train_seed, budget_clock, weights_dir, metrics_path, trained_at_once and
        sampled_at_once; `send` tells the harness an event."""
        settings = spec["settings"]
        self._scorers = [one.scorer for one in environments if one.scorer]
        self._clock = self._cpu_seconds if spec["budget_clock"] == "cpu" else time.monotonic
        self._settings, self._sample, self._send = settings, sample, send
        self.is_stopped: Callable[[], bool] = lambda: False  # ends the training as the budget does
        self._sampled_at_once: int = spec["sampled_at_once"]
        self._names = [environment.name for environment in environments]
        self._set = training_set(environments, settings.get("ratio", {}))
        self._metrics_path = Path(spec["metrics_path"])
        self._row: dict[str, Any] = {}
        self._is_trained: torch.Tensor  # (rows, completion tokens): the tokens that the loss is of
        self._rollout_log = RolloutLog()
        self._reward_means: list[float] = []  # one a step
        self._num_collated = itertools.count()
        self._started = self._ends = self._last_row = math.inf  # on the budget's clock
        prompts = [
            tokenizer.apply_chat_template(one.episode(example).ask(), tokenize=False, add_generation_prompt=True)
            for one, example in self._set
        ]
        self._prompt_ids: dict[str, list[int]] = dict(zip(prompts, tokenizer(prompts)["input_ids"], strict=True))
        longest = max(map(len, self._prompt_ids.values()))
        limit = min(settings["max_completion_tokens"], settings["seq_len"] - longest)
        if limit < 1:
            raise ValueError(f"seq_len = {settings['seq_len']} leaves no room after a prompt of {longest} tokens")
        pools = settings.get("difficulty_pools")
        self._pools = DifficultyPools(pools, len(prompts), spec["train_seed"]) if pools else None
        # Of more examples than there are TRL's sampler would make no batch at all, for ever.
        repeats = math.ceil(settings["batch_size"] / settings["group_size"] / len(prompts))
        rows = [{"prompt": prompt, "index": index} for index, prompt in enumerate(prompts)] * repeats
        optimizer = make_optimizer(settings["optimizer"], list(model.named_parameters()))
        scheduler = make_scheduler(settings["scheduler"], optimizer, settings["max_steps"], settings["optimizer"]["lr"])
        super().__init__(
            model=model,
            processing_class=tokenizer,
            reward_funcs=self._reward,
            args=_config(spec, limit, model.device.type == "cuda"),
            train_dataset=Dataset.from_list(rows),
            optimizers=(optimizer, scheduler),
        )
        self.train_dataset, self.data_collator = rows, self._collate  # as a list it costs nothing to look rows up
        self.remove_callback(PrinterCallback)

    def train_for(self, budget_seconds: float) -> dict[str, Any]:
        """Train until the budget ends or max_steps is reached; the fields of the `trained` event."""
        began = time.monotonic()
        self._started = self._last_row = self._clock()
        self._ends = self._started + budget_seconds
        try:
            # Made here and held open: nothing that others put in its place later is written to.
            with self._metrics_path.open("x", buffering=1) as self._metrics_file:
                self.train()
            outcome = "finished" if self.state.global_step == self._settings["max_steps"] else "budget"
        except _BudgetEnd:
            outcome = "budget"
        for scorer in self._scorers:
            scorer.close()
        self._rollout_log.write(self._metrics_path.with_name("rollouts.jsonl"))
        return {
            "outcome": outcome,
            "num_steps": self.state.global_step,
            "training_seconds": time.monotonic() - began,
            "reward_mean": fmean(self._reward_means) if self._reward_means else None,
        }

    def _reward(
        self, completions: list[str], index: list[int], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """What TRL subtracts the group mean from: the reward for grpo, (r - mean) / mean for max_rl.

        Groups are whole and adjacent here, and max_rl's values have mean zero in each group.
        """
        failed = sum(scorer.num_failed for scorer in self._scorers)
        rewards = torch.tensor([self._score(text, i) for text, i in zip(completions, index, strict=True)])
        is_cut = [
            len(ids) == self.max_completion_length and ids[-1] not in self.eos_token_ids for ids in completion_ids
        ]
        problems = [self.train_dataset[i]["prompt"] for i in index]
        self._rollout_log.look(self.state.global_step + 1, problems, completions, rewards.tolist(), is_cut)
        groups = rewards.view(-1, self.num_generations)
        self._row |= {
            "reward_mean": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "all_right_share": (groups == 1).all(1).float().mean().item(),
            "all_wrong_share": (groups == 0).all(1).float().mean().item(),
            "equal_share": (groups == groups[:, :1]).all(1).float().mean().item(),
        }
        if self._pools:
            for i, mean in zip(index[:: self.num_generations], groups.mean(1).tolist(), strict=True):
                self._pools.observe(i, mean)
        if self._scorers:
            failed = sum(scorer.num_failed for scorer in self._scorers) - failed
            self._row["error_share"] = failed / len(rewards)
        if len(self._names) > 1:
            each = [(self._set[i][0].name, reward) for i, reward in zip(index, rewards.tolist(), strict=True)]
            by_name = {name: [reward for of, reward in each if of == name] for name in self._names}
            self._row["rewards"] = {name: fmean(found) for name, found in by_name.items() if found}
        if self._settings["algo"]["type"] == "max_rl":
            mean = groups.mean(1, keepdim=True)
            rewards = torch.where(mean > 0, (groups - mean) / mean.clamp(min=1e-12), 0.0).flatten()
        return rewards.tolist()

    def _cpu_seconds(self) -> float:
        """This process's, and what its environments computed beside it to score."""
        return time.process_time() + sum(scorer.cpu_seconds for scorer in self._scorers)

    def _score(self, text: str, index: int) -> float:
        environment, example = self._set[index]
        episode = environment.episode(example)
        episode.answer(text)
        return episode.score()

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [self._prompt_ids[prompt] for prompt in prompts], None, {}

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[Any, Any]:
        self.model.eval()
        with self.accelerator.autocast():
            policy, group_size = self.accelerator.unwrap_model(self.model), self.num_generations
            samples = self._say(policy, self.temperature, prompt_ids[::group_size], group_size)
        self.model.train()
        return [one.ids for one in samples], None

    def _say(self, model: Any, temperature: float, prompts: list[list[int]], group_size: int = 1) -> list[Sample]:
        num, said = max(self._sampled_at_once // group_size, 1), list[Sample]()
        for start in range(0, len(prompts), num):
            said += self._sample(
                model, prompts[start : start + num], group_size, self.max_completion_length, temperature,
                set(self.eos_token_ids), self._end_in_time,
            )  # fmt: skip
        return said

    def _end_in_time(self) -> None:
        if self._clock() >= self._ends or self.is_stopped():
            raise _BudgetEnd

    def _collate(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """TRL's loader brings a whole batch once for every part of it that is passed over; it looks at the first."""
        self._end_in_time()
        return rows if next(self._num_collated) % self.args.steps_per_generation == 0 else []

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Before and after generation, and before every pass of an update."""
        self._end_in_time()
        if self._pools and generation_batch:  # here: the loader is a batch ahead, and would not know the last rewards
            drawn = self._pools.draw(len(generation_batch) // self.num_generations)
            generation_batch = [self.train_dataset[index] for index in drawn for _ in range(self.num_generations)]
        inputs = super()._prepare_inputs(generation_batch)
        self._end_in_time()
        return inputs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        began = self._clock()
        batch = super()._generate_and_score_completions(inputs)
        now = self._clock()
        metrics = self._metrics["train"]
        self._row |= {
            "completion_tokens_mean": metrics["completions/mean_length"][-1],
            "truncated_share": metrics["completions/clipped_ratio"][-1],
            "generate_seconds": now - began,
            "num_tokens": (batch["completion_mask"] * batch.get("tool_mask", 1)).sum().item(),
        }
        return self._without_zero_advantages(batch) if self._settings["filter_zero_advantages"] else batch

    def _without_zero_advantages(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The rows that teach something, and as few others as the equal split into micro-batches needs.

        The loss is averaged over the tokens of the rows that teach, as prime-rl does. (Where prime-rl
        repeats a batch in which no row does, this one makes an update without a gradient.)
        """
        chunks = self.args.steps_per_generation
        is_useful = batch["advantages"] != 0
        num_kept = max(chunks, math.ceil(is_useful.sum().item() / chunks) * chunks)
        kept = is_useful.float().argsort(descending=True, stable=True)[:num_kept]
        rows = {name: value[kept] if value.ndim > 0 else value for name, value in batch.items()}
        said = batch["completion_mask"] * batch.get("tool_mask", 1)  # without what it was told between its turns
        rows["num_items_in_batch"] = said[is_useful].sum()
        return rows

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        # Without the tokens that the policy was told between its turns.
        self._is_trained = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Both (rows, logits_to_keep), and 0 where nothing is learned from; None: no loss of a mixture of experts."""
        if input_ids.is_cuda:
            theirs: tuple[torch.Tensor, torch.Tensor, None] = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, **more
            )
            return theirs
        policy = self.accelerator.unwrap_model(model)
        return *log_probs_and_entropies(policy, input_ids, attention_mask, self._is_trained, self.temperature), None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write the metrics row of the step that TRL logs; the figures are of its rollouts."""
        super().log(logs, start_time)  # adds its own figures to `logs`
        if "grad_norm" not in logs:
            return  # the summary at the end of training
        now, row = self._clock(), self._row
        step, lr = self.state.global_step, logs["learning_rate"]
        for name in ("loss", "grad_norm"):
            if not math.isfinite(logs[name]):
                raise ValueError(f"{name} became {logs[name]} at step {step} with lr {lr:g}")
        seconds, self._last_row = now - self._last_row, now
        num_tokens = row.pop("num_tokens")
        row = {
            "step": step,
            "time": now - self._started,
            **row,
            # Per token, of the rows trained on, at the sampling temperature; not measured where no token was left.
            "entropy": logs["entropy"] if math.isfinite(logs["entropy"]) else None,
            "kl": None,
            "grad_norm": logs["grad_norm"],
            "lr": lr,
            "loss": logs["loss"],
            "tokens_per_second": num_tokens / seconds,
            "train_seconds": seconds - row["generate_seconds"],
        }
        self._reward_means.append(row["reward_mean"])
        self._metrics_file.write(json.dumps(row) + "\n")
        self._send({"event": "step", **row})


def _config(spec: Mapping[str, Any], limit: int, cuda: bool) -> GRPOConfig:
    """Everything that TRL decides; `limit` is the completion limit in tokens."""
    settings = spec["settings"]
    batch_size, max_norm = settings["batch_size"], settings["optimizer"]["max_norm"]
    micro_batch = max(size for size in range(1, spec["trained_at_once"] + 1) if batch_size % size == 0)
    return GRPOConfig(
        output_dir=spec["weights_dir"],
        seed=spec["train_seed"],
        max_steps=settings["max_steps"] or NO_LIMIT_STEPS,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch_size // micro_batch,
        num_generations=settings["group_size"],
        temperature=settings["temperature"],
        max_completion_length=limit,
        # The advantage is reward minus group mean, and the loss a mean over all tokens of the batch.
        scale_rewards="none",
        loss_type="dapo",
        beta=0.0,
        max_grad_norm=math.inf if max_norm is None else max_norm,
        bf16=cuda,
        gradient_checkpointing=cuda,
        use_cpu=not cuda,
        # A row a step, nothing else: no progress bars, reports, checkpoints or completions.
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=cuda,
    )

"""TRL's GRPOTrainer with the settings of prime-rl, and one metrics row per step.

Differences from GRPOTrainer:
- sampler.py samples, because `generate` takes longer than the rest of a step;
- rollouts with zero advantage are removed before the forward and backward pass, as in prime-rl;
- on a CPU, sampler.py also computes log-probabilities, without padding;
- several environments are mixed by their ratio, as in prime-rl;
- optimizer and schedule are those of prime-rl's trainer/optim and trainer/scheduler.py;
- training ends after a time, not after a number of steps. No update begins after that time.
"""

import itertools
import json
import math
import resource
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from nightshift.engines.trl.sampler import Sample, log_probs_and_entropies, sample
from nightshift.evaluation.environment import Environment

NUM_ROLLOUTS = 20  # kept of the last steps: the best and the worst of each
MAX_TEXT = 4_000  # characters kept of a problem or completion
NO_LIMIT_STEPS = 10**9  # for an unset max_steps
Batch = dict[str, Any]  # tensors and other values by name
Settings = Mapping[str, Any]


class MuonWithAdamW(Optimizer):
    """Muon and AdamW as one optimizer, like prime-rl's Muon."""

    def __init__(self, muon: Optimizer, adamw: Optimizer) -> None:
        self._optimizers = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # The schedule changes the groups of this optimizer, which accelerate has replaced by copies.
        for optimizer, group in zip(self._optimizers, self.param_groups, strict=True):
            optimizer.param_groups[0]["lr"] = group["lr"]
            optimizer.step()


def make_optimizer(settings: Settings, named_parameters: Sequence[tuple[str, Any]]) -> Optimizer:
    """Return prime-rl's optimizer: one weight decay for all parameters, and Muon for the matrices of the blocks."""
    lr, weight_decay = settings["lr"], settings["weight_decay"]
    parameters = [parameter for _, parameter in named_parameters]
    if settings["type"] == "sgd":
        momentum, nesterov = settings["momentum"], settings["nesterov"]
        return torch.optim.SGD(parameters, lr, momentum, weight_decay=weight_decay, nesterov=nesterov)
    betas = (settings["betas1"], settings["betas2"])
    if settings["type"] == "adamw":
        return torch.optim.AdamW(parameters, lr, betas, weight_decay=weight_decay, fused=True)
    rest, matrices = list[Any](), list[Any]()
    for name, parameter in named_parameters:
        is_matrix = parameter.ndim >= 2 and "lm_head" not in name and "embed_tokens" not in name
        (matrices if is_matrix else rest).append(parameter)
    # prime-rl uses dion's Muon, which has other Newton-Schulz coefficients.
    muon = torch.optim.Muon(
        matrices, lr, weight_decay, momentum=settings["mu"], nesterov=False, adjust_lr_fn="match_rms_adamw"
    )
    return MuonWithAdamW(muon, torch.optim.AdamW(rest, lr, betas, weight_decay=weight_decay, fused=True))


def make_scheduler(settings: Settings, optimizer: Optimizer, max_steps: Any, lr: float) -> LRScheduler:
    """Compose torch's schedules as prime-rl does. config/checks.py ensures that they end at `max_steps`."""
    if settings["type"] == "constant":
        return ConstantLR(optimizer, factor=1.0)
    warmup_steps, min_lr = settings["warmup_steps"], settings["min_lr"]
    lowest = min_lr / lr if min_lr > 0 else 1e-8
    phases, milestones = list[LRScheduler](), list[int]()
    if warmup_steps > 0:
        phases.append(LinearLR(optimizer, start_factor=lowest, end_factor=1.0, total_iters=warmup_steps))
        milestones.append(warmup_steps)
    if settings["type"] == "cosine":
        phases.append(CosineAnnealingLR(optimizer, T_max=max_steps - warmup_steps, eta_min=min_lr))
    elif decay_steps := settings["decay_steps"]:
        constant_steps = max_steps - decay_steps - warmup_steps
        phases.append(LinearLR(optimizer, start_factor=1.0, end_factor=1.0, total_iters=constant_steps))
        phases.append(LinearLR(optimizer, start_factor=1.0, end_factor=lowest, total_iters=decay_steps - 1))
        milestones.append(max_steps - decay_steps)
    return phases[0] if len(phases) == 1 else SequentialLR(optimizer, phases, milestones=milestones)


class _BudgetEnd(Exception):
    """Ends the training between two tokens, or between two passes of an update, which is dropped."""


class Trainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO on one device for a number of seconds. Call `train_for` only."""

    def __init__(
        self, model: Any, tokenizer: Any, environments: Sequence[Environment], spec: Settings, send: Callable[..., None]
    ) -> None:
        """`spec`: the contents of spec.json (engine.py). `send`: sends an event to the harness."""
        settings = spec["settings"]
        self._settings, self._send = settings, send
        self._sampled_at_once: int = spec["sampled_at_once"]
        self._scorers = [environment.scorer for environment in environments if environment.scorer]
        self._clock = time.monotonic
        if spec["budget_clock"] == "cpu":  # of this process and of the scoring processes
            self._clock = lambda: time.process_time() + sum(scorer.cpu_seconds for scorer in self._scorers)
        self._started = self._ends = self._last_row = math.inf  # on self._clock
        self.is_stopped: Callable[[], bool] = lambda: False  # True ends the training like the end of the budget
        self._metrics_path = Path(spec["metrics_path"])
        self._row: dict[str, Any] = {}
        self._reward_means: list[float] = []  # one a step
        self._rollouts = deque[dict[str, Any]](maxlen=NUM_ROLLOUTS)
        # All examples. Several environments get shares of the same total by their ratio, with repetitions if necessary.
        sets, ratio = [environment.examples("train") for environment in environments], settings.get("ratio", {})
        shares = [ratio.get(environment.name, 1.0) for environment in environments]
        total = sum(map(len, sets)) / sum(shares)
        self._set = [
            (environment, example)
            for environment, examples, share in zip(environments, sets, shares, strict=True)
            for example in itertools.islice(itertools.cycle(examples), max(round(total * share), 1))
        ]
        chats = [environment.episode(example).ask() for environment, example in self._set]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        self._prompt_ids: dict[str, list[int]] = dict(zip(prompts, tokenizer(prompts)["input_ids"], strict=True))
        longest = max(map(len, self._prompt_ids.values()))
        limit = min(settings["max_completion_tokens"], settings["seq_len"] - longest)
        if limit < 1:
            raise ValueError(f"seq_len = {settings['seq_len']} leaves no room after a prompt of {longest} tokens")
        # TRL's sampler would loop forever if a batch had more examples than the dataset.
        repeats = math.ceil(settings["batch_size"] / settings["group_size"] / len(prompts))
        rows = [{"prompt": prompt, "index": index} for index, prompt in enumerate(prompts)] * repeats
        is_cuda, max_norm = model.device.type == "cuda", settings["optimizer"]["max_norm"]
        micro_batch = max(size for size in range(1, spec["trained_at_once"] + 1) if settings["batch_size"] % size == 0)
        config = GRPOConfig(
            output_dir=spec["weights_dir"],
            seed=spec["train_seed"],
            max_steps=settings["max_steps"] or NO_LIMIT_STEPS,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=settings["batch_size"] // micro_batch,
            num_generations=settings["group_size"],
            temperature=settings["temperature"],
            max_completion_length=limit,
            scale_rewards="none",  # the advantage is reward minus group mean
            max_grad_norm=math.inf if max_norm is None else max_norm,
            bf16=is_cuda,
            gradient_checkpointing=is_cuda,
            use_cpu=not is_cuda,
            # One row per step; no progress bars, checkpoints or completions.
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=is_cuda,
        )
        optimizer = make_optimizer(settings["optimizer"], list(model.named_parameters()))
        scheduler = make_scheduler(settings["scheduler"], optimizer, settings["max_steps"], settings["optimizer"]["lr"])
        super().__init__(
            model=model,
            processing_class=tokenizer,
            reward_funcs=self._reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            optimizers=(optimizer, scheduler),
        )
        self.train_dataset = rows  # lookups in a list are faster
        self.remove_callback(PrinterCallback)

    def train_for(self, budget_seconds: float) -> dict[str, Any]:
        """Train until the budget ends or max_steps is reached. Return the fields of Training."""
        began = time.monotonic()
        self._started = self._last_row = self._clock()
        self._ends, outcome = self._started + budget_seconds, "budget"
        with suppress(_BudgetEnd):
            with self._metrics_path.open("x", buffering=1) as self._metrics_file:  # a replaced file gets no rows
                self.train()
            if self.state.global_step == self._settings["max_steps"]:
                outcome = "finished"
        for scorer in self._scorers:
            scorer.close()
        lines = [json.dumps(rollout) + "\n" for rollout in self._rollouts]
        self._metrics_path.with_name("rollouts.jsonl").write_text("".join(lines))
        num_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if self.model.device.type == "cuda":
            num_bytes = torch.cuda.max_memory_allocated()
        return {
            "outcome": outcome,
            "num_steps": self.state.global_step,
            "training_seconds": time.monotonic() - began,
            "reward_mean": fmean(self._reward_means) if self._reward_means else None,
            "peak_memory_gb": num_bytes / 1e9,
        }

    def _reward(
        self, completions: list[str], index: list[int], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """Return the values from which TRL subtracts the group mean: rewards for grpo, (r - mean) / mean for max_rl,
        whose group mean is zero. Groups are complete and adjacent here."""
        failed = sum(scorer.num_failed for scorer in self._scorers)
        rewards = torch.tensor([self._score(text, i) for text, i in zip(completions, index, strict=True)])
        order = rewards.argsort(stable=True).tolist()
        for i in (order[-1], order[0]):
            ids = completion_ids[i]
            rollout = {
                "step": self.state.global_step + 1,
                "reward": rewards[i].item(),
                "truncated": len(ids) == self.max_completion_length and ids[-1] not in self.eos_token_ids,
                "problem": self.train_dataset[index[i]]["prompt"][:MAX_TEXT],
                "completion": completions[i][:MAX_TEXT],
            }
            self._rollouts.append(rollout)
        groups = rewards.view(-1, self.num_generations)
        self._row |= {
            "reward_mean": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "all_right_share": (groups == 1).all(1).float().mean().item(),
            "all_wrong_share": (groups == 0).all(1).float().mean().item(),
            "equal_share": (groups == groups[:, :1]).all(1).float().mean().item(),
        }
        if self._scorers:
            failed = sum(scorer.num_failed for scorer in self._scorers) - failed
            self._row["error_share"] = failed / len(rewards)
        if "ratio" in self._settings:  # of several environments
            by_name = defaultdict(list)
            for i, reward in zip(index, rewards.tolist(), strict=True):
                by_name[self._set[i][0].name].append(reward)
            self._row["rewards"] = {name: fmean(values) for name, values in by_name.items()}
        if self._settings["algo"]["type"] == "max_rl":
            mean = groups.mean(1, keepdim=True)
            rewards = torch.where(mean > 0, (groups - mean) / mean.clamp(min=1e-12), 0.0).flatten()
        return rewards.tolist()

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
        return [sample.ids for sample in samples], None

    def _say(self, model: Any, temperature: float, prompts: list[list[int]], group_size: int = 1) -> list[Sample]:
        num, samples = max(self._sampled_at_once // group_size, 1), list[Sample]()
        most, ends = self.max_completion_length, set(self.eos_token_ids)
        for start in range(0, len(prompts), num):
            batch = prompts[start : start + num]
            samples += sample(model, batch, group_size, most, temperature, ends, self._end_in_time)
        return samples

    def _end_in_time(self) -> None:
        if self._clock() >= self._ends or self.is_stopped():
            raise _BudgetEnd

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Check the time before every pass of an update."""
        inputs = super()._prepare_inputs(generation_batch)
        self._end_in_time()
        return inputs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        began, self._indices = self._clock(), [row["index"] for row in inputs]
        batch = super()._generate_and_score_completions(inputs)
        now = self._clock()
        metrics = self._metrics["train"]
        self._row |= {
            "completion_tokens_mean": metrics["completions/mean_length"][-1],
            "truncated_share": metrics["completions/clipped_ratio"][-1],
            "generate_seconds": now - began,
        }
        self._num_tokens = _own_tokens(batch).sum().item()
        return self._without_zero_advantages(batch) if self._settings["filter_zero_advantages"] else batch

    def _without_zero_advantages(self, batch: Batch) -> Batch:
        """Return the rows with an advantage, and as few others as the split into equal micro-batches needs.

        The loss is averaged over the tokens of rows with an advantage. A batch without such a row makes an update
        without gradient; prime-rl samples another batch.
        """
        chunks = self.args.steps_per_generation
        is_useful = batch["advantages"] != 0
        num_kept = max(chunks, math.ceil(is_useful.sum().item() / chunks) * chunks)
        kept = is_useful.float().argsort(descending=True, stable=True)[:num_kept]
        rows = {name: value[kept] if value.ndim > 0 else value for name, value in batch.items()}
        rows["num_items_in_batch"] = _own_tokens(batch)[is_useful].sum()
        return rows

    def _compute_loss(self, model: Any, inputs: Batch) -> Any:
        self._is_trained = _own_tokens(inputs).bool()  # (rows, completion tokens)
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, mask: Any, *others: Any, **more: Any
    ) -> Any:
        """Return log-probabilities and entropies (rows, completion tokens), 0 at tokens that are not trained, and None
        for the loss of MoE models."""
        if input_ids.is_cuda:
            return super()._get_per_token_logps_and_entropies(model, input_ids, mask, *others, **more)
        policy = self.accelerator.unwrap_model(model)
        return *log_probs_and_entropies(policy, input_ids, mask, self._is_trained, self.temperature), None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write the metrics row of the step that TRL logs."""
        super().log(logs, start_time)  # adds values to `logs`
        if "grad_norm" not in logs:
            return  # the summary at the end of training
        now, step, lr = self._clock(), self.state.global_step, logs["learning_rate"]
        for name in ("loss", "grad_norm"):
            if not math.isfinite(logs[name]):
                raise ValueError(f"{name} became {logs[name]} at step {step} with lr {lr:g}")
        seconds, self._last_row = now - self._last_row, now
        row = {
            "step": step,
            "time": now - self._started,
            **self._row,
            # Per token of the trained rows, at the sampling temperature; not finite without trained tokens.
            "entropy": logs["entropy"] if math.isfinite(logs["entropy"]) else None,
            "kl": None,
            "grad_norm": logs["grad_norm"],
            "lr": lr,
            "loss": logs["loss"],
            "tokens_per_second": self._num_tokens / seconds,
            "train_seconds": seconds - self._row["generate_seconds"],
        }
        self._reward_means.append(row["reward_mean"])
        self._metrics_file.write(json.dumps(row) + "\n")
        self._send({"event": "step", "row": row})


def _own_tokens(batch: Mapping[str, Any]) -> Any:
    """Return the mask of the tokens that the policy sampled, without the messages between its turns."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)

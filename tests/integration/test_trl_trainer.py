"""What the trainer and its sampler compute, against transformers' own code and prime-rl's definitions."""

import importlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from nightshift_arithmetic import data

from nightshift.evaluation import environment as environments
from tests.conftest import ON_GPU
from tests.rules import ARITHMETIC_TRL, ROOT
from tests.waiting import Clock

# Libraries warn about each other; here only results count.
pytestmark = pytest.mark.filterwarnings("default")

MODEL = ROOT / "models" / "arithmetic-base"
MakeTrainer = Callable[..., tuple[Any, list[dict[str, Any]]]]  # the trainer, and the rows that it sends
ADAMW = {"type": "adamw", "lr": 1e-3, "weight_decay": 0.01, "betas1": 0.9, "betas2": 0.999, "max_norm": None}


@pytest.fixture(scope="module")
def sampler() -> ModuleType:
    return importlib.import_module("nightshift.engines.trl.sampler")


@pytest.fixture(scope="module")
def trainer_module() -> ModuleType:
    return importlib.import_module("nightshift.engines.trl.grpo")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def shipped(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval().to(request.param)
    return model, AutoTokenizer.from_pretrained(MODEL)


def prompt_ids(tokenizer: Any, size: int) -> list[list[int]]:
    messages = [data.messages(example) for example in data.load("train", size)]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return [*encoded["input_ids"]]


def test_greedy_samples_are_those_of_generate(sampler: ModuleType, shipped: tuple[Any, Any]) -> None:
    import torch

    model, tokenizer = shipped
    many = prompt_ids(tokenizer, 10)
    assert len({len(ids) for ids in many}) > 3
    for prompts in ([[7]], [[7], [9]], [[7], *many]):
        samples = sampler.sample(model, prompts, 1, 24, 0.0, {tokenizer.eos_token_id})
        for ids, sample in zip(prompts, samples, strict=True):
            tokens = torch.tensor([ids], device=model.device)
            expected = model.generate(tokens, max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
            assert sample.ids == expected
            assert sample.truncated == (sample.ids[-1] != tokenizer.eos_token_id)
    assert {sample.truncated for sample in samples} == {True, False}


@pytest.mark.parametrize("num_kv", [1, 2, 4])
def test_every_grouping_of_heads_is_that_of_transformers(sampler: ModuleType, num_kv: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(num_kv)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=50, num_key_value_heads=num_kv, **shape)).eval()
    for parameter in model.parameters():  # biases and norms start out as 0 and 1, where errors would not show
        torch.nn.init.normal_(parameter, std=0.3)
    prompt = [5, 7, 11]
    (sample,) = sampler.sample(model, [prompt], 1, 12, 0.0, {49})
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=49)
    assert sample.ids == expected[0, 3:].tolist()


def test_groups_follow_the_prompts_and_the_temperature_shapes_the_draw(sampler, shipped):
    import torch

    model, tokenizer = shipped
    torch.manual_seed(0)
    prompts = prompt_ids(tokenizer, 3)
    for temperature in (0.7, 1.5):
        samples = sampler.sample(model, prompts, 1000, 5, temperature, {tokenizer.eos_token_id})
        assert len(samples) == 3000
        for index, ids in enumerate(prompts):
            group = samples[index * 1000 : (index + 1) * 1000]
            prefix = sampler.sample(model, [ids], 1, 4, 0.0, {tokenizer.eos_token_id})[0].ids
            chosen = [sample.ids[4] for sample in group if sample.ids[:4] == prefix]  # the drawn container size
            assert len(chosen) > 750
            with torch.no_grad():
                logits = model(torch.tensor([ids + prefix], device=model.device)).logits[0, -1].cpu()
            probabilities = torch.softmax(logits / temperature, dim=-1)
            frequencies = torch.bincount(torch.tensor(chosen), minlength=len(probabilities)) / len(chosen)
            assert (frequencies - probabilities).abs().max() < 0.07  # 4 sd at p = 1/2


PLAIN = {"optimizer": ADAMW, "scheduler": {"type": "constant"}, "algo": {"type": "grpo"}, "temperature": 1.0}
PLAIN |= {"batch_size": 32, "group_size": 4, "max_completion_tokens": 40, "max_steps": 1, "seq_len": 512}
PLAIN["filter_zero_advantages"] = True


def make_spec(folder: Path, trained_at_once: int = 512, **changes: Any) -> dict[str, Any]:
    """What a trainer is given, but for where it runs."""
    limits = {"budget_clock": "cpu", "trained_at_once": trained_at_once, "sampled_at_once": 512}
    places = {"weights_dir": str(folder / "weights"), "metrics_path": str(folder / "metrics.jsonl")}
    return {"settings": PLAIN | changes, "train_seed": 3, **limits, **places}


@pytest.fixture
def make_trainer(trainer_module: ModuleType, tmp_path: Path) -> MakeTrainer:
    def make(trained_at_once: int = 512, others: Any = (), **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        rows: list[dict[str, Any]] = []
        wanted = replace(ARITHMETIC_TRL.environments[0], num_train=64)
        (environment,) = environments.load(ROOT, [wanted])
        trainer = trainer_module.Trainer(
            AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"),
            AutoTokenizer.from_pretrained(MODEL),
            [environment, *others],
            make_spec(tmp_path, trained_at_once, **changes),
            lambda event: rows.append(event["row"]),
        )
        return trainer, rows

    return make


def inputs_of(trainer: Any, group_size: int) -> list[dict[str, Any]]:
    """The 32 rollouts of a batch."""
    rows = [row for row in trainer.train_dataset for _ in range(group_size)]
    return [{"prompt": row["prompt"], "index": row["index"]} for row in rows[:32]]


def test_what_a_scorer_computes_is_part_of_the_budget_and_what_it_fails_at_is_told(make_trainer: MakeTrainer) -> None:
    """With a stand-in for another environment: arithmetic's eight questions, with episodes of its own."""
    closed: list[bool] = []
    scorer = SimpleNamespace(num_failed=0, cpu_seconds=0.0, close=lambda: closed.append(True))
    (arithmetic,) = environments.load(ROOT, [replace(ARITHMETIC_TRL.environments[0], num_train=8)])

    class Failing:
        def __init__(self, example: Any) -> None:
            episode = arithmetic.episode(example)
            self.ask, self.answer, self.is_formatted = episode.ask, episode.answer, episode.is_formatted

        def score(self) -> float:
            scorer.num_failed += 1
            scorer.cpu_seconds += 10.0
            return 0.0

    other = SimpleNamespace(name="other", scorer=scorer, examples=arithmetic.examples, episode=Failing)
    trainer, rows = make_trainer(others=[other], max_steps=5, ratio={"other": 1e6})
    assert trainer.train_for(1000.0)["outcome"] == "budget"  # 32 answers a step, of 10 s each
    assert [(row["error_share"], row["rewards"]["other"]) for row in rows] == [(1.0, 0.0)] * len(rows)
    assert 320 < rows[0]["time"] < 640
    assert len(rows) == 3
    assert closed == [True]


def test_the_loss_is_the_token_mean_of_minus_advantage_and_filtering_only_drops_dead_rows(make_trainer):
    import torch

    gradients, token_counts = [], []
    for is_filtered in (True, False):
        trainer, _ = make_trainer(filter_zero_advantages=is_filtered)
        torch.manual_seed(5)
        trainer.model.train()
        trainer._ends, trainer._started = math.inf, 0.0
        batch = trainer._generate_and_score_completions(inputs_of(trainer, 4))
        if is_filtered:
            assert (batch["advantages"] != 0).all()
            assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
        else:
            assert len(batch["advantages"]) == 32
            groups = batch["advantages"].view(8, 4)
            assert torch.allclose(groups.sum(1), torch.zeros(8), atol=1e-6)
            assert ((groups.abs() <= 0.75) | (groups == 0)).all()  # reward minus mean, not divided by the sd
        trainer.current_gradient_accumulation_steps = 1
        trainer.compute_loss(trainer.model, batch).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]))
        token_counts.append(batch["num_items_in_batch"].item())
    assert token_counts[0] < token_counts[1]
    assert torch.allclose(gradients[0] * token_counts[0], gradients[1] * token_counts[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("group_size", "temperature", "num_mixed"), [(16, 0.7, 0), (2, 1.3, 5)], ids=["large", "told"])
def test_log_probs_entropies_and_gradients_are_trls(make_trainer, group_size, temperature, num_mixed):
    """On a sampled batch; `told`: the last five tokens of some completions are not the policy's own."""
    import torch
    from trl import GRPOTrainer

    trainer, _ = make_trainer(group_size=group_size, temperature=temperature, filter_zero_advantages=False)
    with torch.no_grad():  # biases and norms are near 0 and 1, where errors would not show
        for parameter in trainer.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    trainer._ends, trainer._started = math.inf, 0.0
    trainer.model.train()
    batch = trainer._generate_and_score_completions(inputs_of(trainer, group_size))
    batch["advantages"] = torch.randn(32)
    if num_mixed:
        batch["tool_mask"] = batch["completion_mask"].clone()
        batch["tool_mask"][::3, -num_mixed:] = 0
    trainer.current_gradient_accumulation_steps = 1
    found = []
    ours = trainer._get_per_token_logps_and_entropies
    for path in (ours, partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer)):
        seen: list[Any] = []

        def kept(*arguments: Any, path: Any = path, seen: list[Any] = seen, **named: Any) -> Any:
            seen += path(*arguments, **named)
            return seen

        trainer._get_per_token_logps_and_entropies = kept
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, batch).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])
        found.append((seen[0].detach(), seen[1].detach(), gradient))
    is_trained = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
    (logps, entropies, gradient), (trl_logps, trl_entropies, trl_gradient) = found
    torch.testing.assert_close(logps[is_trained], trl_logps[is_trained], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies[is_trained], trl_entropies[is_trained], atol=1e-5, rtol=1e-5)
    assert trl_gradient.norm() > 1e-3
    assert (gradient - trl_gradient).norm() < 3e-5 * trl_gradient.norm()
    assert not logps[~is_trained].any()
    assert not entropies[~is_trained].any()


def test_max_rl_divides_by_the_mean_and_leaves_groups_without_reward_alone(make_trainer):
    trainer, _ = make_trainer(algo={"type": "max_rl"}, batch_size=8)
    texts = [f"#### {trainer._set[5][1].answer}", *["#### 2000"] * 7]
    rewards = trainer._reward(completions=texts, index=[5] * 8, completion_ids=[[1, 2]] * 8)
    assert rewards == pytest.approx([3.0, -1.0, -1.0, -1.0, 0, 0, 0, 0])
    assert trainer._row["reward_mean"] == pytest.approx(1 / 8)  # the metrics stay raw
    assert (trainer._row["all_right_share"], trainer._row["all_wrong_share"]) == (0.0, 0.5)


def test_a_batch_without_any_advantage_is_a_step_without_a_gradient(make_trainer):
    trainer, rows = make_trainer(optimizer=ADAMW | {"weight_decay": 0.0})
    trainer._score = lambda text, index: 0.0
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert trainer.train_for(math.inf)["num_steps"] == 1
    assert rows[0]["all_wrong_share"] == 1.0
    assert rows[0]["grad_norm"] == 0.0
    assert not {"rewards", "error_share"} & {*rows[0]}  # of one environment without a scorer
    assert all(bool((old == new).all()) for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_a_diverging_run_is_an_error_that_names_step_and_lr(make_trainer: MakeTrainer) -> None:
    trainer, rows = make_trainer(optimizer=ADAMW | {"lr": 1e30}, max_steps=20)
    with pytest.raises(ValueError, match=r"step \d+ .*lr 1e\+30"):
        trainer.train_for(math.inf)
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))


def test_a_prompt_that_does_not_fit_is_refused_at_the_start(make_trainer: MakeTrainer) -> None:
    with pytest.raises(ValueError, match="seq_len = 20 leaves no room"):
        make_trainer(seq_len=20)


def test_a_budget_of_cpu_seconds_waits_while_others_have_the_machine(make_trainer, trainer_module, monkeypatch):
    """An hour passes between any two looks at the clock on the wall."""
    wall = Clock()
    wall.step = 3600.0
    clocks = SimpleNamespace(monotonic=wall, process_time=time.process_time)
    monkeypatch.setattr(trainer_module, "time", clocks)
    trainer, rows = make_trainer(max_steps=2)
    trained = trainer.train_for(600.0)
    assert (trained["outcome"], trained["num_steps"]) == ("finished", 2)
    assert 0 < rows[-1]["time"] < 600.0 < 3600.0 <= trained["training_seconds"]


def test_a_huge_step_ends_with_the_budget_and_is_dropped(make_trainer, trainer_module, monkeypatch):
    """By a clock of its own every token costs a second."""
    trainer, _ = make_trainer(batch_size=16384, max_steps=None)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    tokens, sample = list[str](), trainer_module.sample
    trainer._clock = lambda: float(len(tokens))

    def sampled(*arguments: Any) -> Any:
        *others, look = arguments
        return sample(*others, lambda: (tokens.append("one"), look()))

    monkeypatch.setattr(trainer_module, "sample", sampled)
    trained = trainer.train_for(10.0)
    assert (trained["outcome"], trained["num_steps"], len(tokens)) == ("budget", 0, 10)
    assert all(bool((old == new).all()) for old, new in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "sgd", "lr": 1e-3, "weight_decay": 0.01, "momentum": 0.9, "nesterov": True, "max_norm": 1.0},
        {"type": "muon", "lr": 1e-3, "weight_decay": 0.01, "mu": 0.95, "betas1": 0.9, "betas2": 0.95, "max_norm": 1.0},
    ],
)
def test_every_optimizer_trains_with_a_schedule(make_trainer, optimizer, tmp_path):
    schedule = {"type": "linear", "warmup_steps": 2, "decay_steps": 0, "min_lr": 0.0}
    trainer, rows = make_trainer(optimizer=optimizer, scheduler=schedule, max_steps=3)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    assert trainer.train_for(math.inf)["outcome"] == "finished"
    assert [row["lr"] for row in rows] == pytest.approx([1e-11, 5e-4, 1e-3])
    unmoved = [name for name, parameter in trainer.model.named_parameters() if bool((parameter == before[name]).all())]
    assert unmoved == []
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "max_steps", "expected"),
    [
        ({"type": "constant"}, None, [1.0] * 6),
        ({"type": "linear", "warmup_steps": 2, "decay_steps": 3, "min_lr": 0.1}, 6, [0.1, 0.55, 1.0, 1.0, 0.55, 0.1]),
        ({"type": "linear", "warmup_steps": 2, "decay_steps": 0, "min_lr": 0.0}, None, [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"type": "cosine", "warmup_steps": 2, "min_lr": 0.2}, 6, [0.2, 0.6, 1.0, 0.8828, 0.6, 0.3172]),
    ],
)
def test_schedules_are_prime_rls(trainer_module, settings, max_steps, expected):
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = trainer_module.make_scheduler(settings, optimizer, max_steps, 1.0)
    factors = []
    for _ in expected:
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert factors == pytest.approx(expected, abs=1e-4)

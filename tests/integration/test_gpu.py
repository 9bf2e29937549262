"""Needs a real NVIDIA card: NVML as the driver answers, the sampler on CUDA, a short training. Skipped without one.

uv run --group dev pytest -n 0 -m gpu
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import load
from nightshift.engines.standstill import Standstill
from nightshift.engines.trl.engine import MIN_DRIVER, TrlEngine
from nightshift.executors.gpus import PeakMemory, gpu_problems, gpu_warnings, list_gpus, num_gpus, nvml_session
from tests.rules import ROOT
from tests.waiting import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="no NVIDIA GPU")]
MODEL = ROOT / "models" / "arithmetic-base"
HOLD = """
import sys, torch
size = int(torch.cuda.get_device_properties(0).total_memory * 0.3)
held = torch.ones(size, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.readline()
while True:
    held.add_(1)
"""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """Another process with 30 % of the first card's memory; it computes once a line is written to it."""
    environ = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environ, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_driver_describes_each_card() -> None:
    gpus = list_gpus()
    assert num_gpus(os.environ) <= len(gpus)
    for gpu in gpus:
        assert gpu.name
        assert gpu.uuid.startswith("GPU-")
        assert gpu.memory_gb is None or gpu.memory_gb > 1.0
    assert gpu_warnings(gpus[:1], MIN_DRIVER) == []


def test_a_card_that_another_process_uses_is_refused(holder: subprocess.Popen[str]) -> None:
    [problem] = gpu_problems(list_gpus()[:1])
    assert "in use" in str(problem)
    with nvml_session() as session:
        peak = PeakMemory((0,), session)
        peak.sample()
    assert peak.peak_gb is not None
    assert peak.peak_gb > 0.25 * (list_gpus()[0].memory_gb or 0.0)


def test_a_card_that_computes_is_no_standstill(holder: subprocess.Popen[str]) -> None:
    """Its process may use no CPU meanwhile: none is watched here."""
    assert holder.stdin is not None
    holder.stdin.write("compute\n")
    holder.stdin.flush()
    now = 0.0
    with nvml_session() as session:
        card = session.nvmlDeviceGetHandleByIndex(0)
        wait_for(lambda: session.nvmlDeviceGetUtilizationRates(card).gpu > 0)
        watch = Standstill(list, (0,), session, seconds=100.0, clock=lambda: now)
        for _ in range(30):
            now += 5.0
            watch.look(0)


@pytest.fixture
def prompts() -> Iterator[tuple[Any, Any, list[list[int]]]]:
    """The shipped model on the card, its tokenizer, and forty prompts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sys.path.insert(0, str(ROOT / "environments" / "arithmetic"))
    from nightshift_arithmetic import data

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval().to("cuda")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    messages = [data.messages(example) for example in data.load("train", 40)]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    yield model, tokenizer, ids
    sys.path.pop(0)


def test_greedy_completions_in_float32_are_those_of_generate(prompts: Any) -> None:
    import torch

    from nightshift.engines.trl.sampler import sample

    model, tokenizer, ids = prompts
    answers = sample(model, ids, 1, 24, 0.0, {tokenizer.eos_token_id})
    for prompt, answer in zip(ids, answers, strict=True):
        tokens = torch.tensor([prompt], device="cuda")
        assert answer.ids == model.generate(tokens, max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()


def test_completions_in_bfloat16_take_likely_tokens(prompts: Any) -> None:
    import torch

    from nightshift.engines.trl.sampler import sample

    model, tokenizer, ids = prompts
    with torch.autocast("cuda", torch.bfloat16):
        answers = sample(model, ids, 1, 24, 0.0, {tokenizer.eos_token_id})
    for prompt, answer in zip(ids, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.ids], device="cuda")).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer.ids, device="cuda")[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max().item() < 0.3  # nats below the best token


def test_a_run_of_trl_trains_and_answers_on_the_card(tmp_path: Path) -> None:
    rules = rules_of(ROOT, Chosen(environments=["arithmetic"]), "trl", 0)
    engine = TrlEngine(rules, ROOT, dict(os.environ), "0")
    settings = dict(engine.validate(load(ROOT / "train.toml")).settings) | {"max_steps": 4}
    session = engine.open(settings, 5, tmp_path, 600.0)
    ignore: Callable[[object], None] = lambda reading: None  # noqa: E731
    try:
        training = session.train(600.0, ignore)
        assert (training.num_steps, training.cause) == (4, None)
        assert training.peak_memory_gb is not None
        assert session.load_final_weights().step == 4
        assert len(session.complete([[{"role": "user", "content": "1 + 1 ="}]], rules.decoding, ignore)) == 1
    finally:
        session.close()

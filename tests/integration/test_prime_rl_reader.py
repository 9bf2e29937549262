"""The child that computes by transformers, on real weights: the repository's tiny model and what was made of it."""

import hashlib
import json
import os
import random
import subprocess
from pathlib import Path

import msgspec
import numpy
import pytest
from safetensors.numpy import load_file, save_file

from nightshift.campaign.records import Weights
from nightshift.engines.prime_rl.served import CHATS, READER, Answers, ServedProof
from nightshift.engines.prime_rl.weights import check_weights
from nightshift.errors import EngineError
from nightshift.executors.process import python_command
from tests.conftest import ROOT, living_children

BASE = ROOT / "models" / "arithmetic-base"
DRAW = random.Random(0)
TOKENS = [[DRAW.randrange(516) for _ in range(40)] for _ in CHATS]
MODULE, RANK, ALPHA = "model.layers.1.mlp.down_proj", 4, 8
A, B = (numpy.random.default_rng(n).normal(0, 0.2, shape) for n, shape in enumerate(((RANK, 336), (128, RANK))))


def trained(folder: Path) -> Path:
    """The base, one matrix of which has learnt, with a config beside it that nobody may read."""
    folder.mkdir()
    tensors = load_file(BASE / "model.safetensors")
    tensors[f"{MODULE}.weight"] += (ALPHA / RANK * (B @ A)).astype(numpy.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("no config")
    return folder


def adapter(folder: Path) -> Path:
    """The same as an adapter, named and shaped as prime-rl's trainer writes it."""
    folder.mkdir()
    pair = {f"{MODULE}.lora_{side}.weight": m.astype(numpy.float32) for side, m in (("A", A), ("B", B))}
    save_file(pair, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA, "peft_type": "LORA"}))
    return folder


Read = dict[str, list[float]]


def read(base: Path, folder: Path) -> subprocess.CompletedProcess[bytes]:
    served, answer = folder.with_name("tokens.json"), folder.with_name("answer.json")
    served.write_bytes(msgspec.json.encode({"tokens": TOKENS}))
    command = python_command(*READER, *map(str, (base, folder, served, answer)))
    return subprocess.run(command, capture_output=True, cwd=ROOT, check=False)


def distance(one: list[float], other: list[float]) -> float:
    return float(numpy.abs(numpy.array(one) - numpy.array(other)).max())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Read]:
    """A run's folder with its weights, and what the child says of them."""
    run_dir = tmp_path_factory.mktemp("run")
    read(BASE, trained(run_dir / "weights"))
    return run_dir, msgspec.json.decode((run_dir / "answer.json").read_bytes(), type=Read)


@pytest.mark.slow
def test_the_child_says_what_torch_says(whole: tuple[Path, Read]) -> None:
    import torch
    from transformers import Qwen2ForCausalLM

    _, found = whole
    assert len(found["file"]) == 39 * len(CHATS)
    assert distance(found["start"], found["file"]) > 0.1
    model = Qwen2ForCausalLM.from_pretrained(BASE)
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([TOKENS[0]])).logits[0].double(), -1)
    by_hand = [float(scores[place, token]) for place, token in enumerate(TOKENS[0][1:])]
    assert distance(by_hand, found["start"][:39]) < 1e-4


def proven(run_dir: Path, served: list[float]) -> str:
    data = msgspec.json.encode(Answers(TOKENS, [served]))
    (run_dir / "served.json").write_bytes(data)
    weights = Weights(3, check_weights(run_dir / "weights"), hashlib.sha256(data).hexdigest())
    line = ServedProof(run_dir, weights, BASE, dict(os.environ)).result()
    assert living_children() == []
    return line


@pytest.mark.slow
def test_an_adapter_is_added_to_the_base_and_one_that_was_not_served_is_caught(
    whole: tuple[Path, Read], tmp_path: Path
) -> None:
    adapter(tmp_path / "weights")
    assert proven(tmp_path, whole[1]["file"]).startswith("served = file: 0.0000 nats a token from the file, 0.")
    with pytest.raises(
        EngineError, match=r"did not serve the file: its log-prob.* are 0\.\d+ nats .* 0\.0000 from the st"
    ):
        proven(tmp_path, whole[1]["start"])

"""The mean of the last published weights: real files, real links, and the real child that adds them up."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nightshift.engines.prime_rl.launch import Launch
from nightshift.engines.prime_rl.recent import Recent
from nightshift.engines.prime_rl.weights import check_weights, latest_stable
from nightshift.errors import EngineError
from tests.conftest import living_children
from tests.prime_rl_plans import launch_of, variant
from tests.unit.test_prime_rl_weights import TRAIN, full

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    launch = replace(launch_of(variant("train"), tmp_path / "run"), score_last=3)
    launch.broadcasts_dir.mkdir(parents=True)
    return launch


def values(step: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + step)
    return (1 + torch.rand(4, 8, generator=generator) / 100).to(torch.bfloat16)


def publish(launch: Launch, step: int, *, is_sharded: bool = False, **tensors: torch.Tensor) -> Path:
    """As prime-rl's trainer does: the files, then STABLE; and step N-2 goes."""
    folder = launch.broadcasts_dir / f"step_{step}"
    folder.mkdir()
    found = {"a.weight": values(step), "b.weight": values(step, 1).float(), **tensors}
    files = dict(zip(SHARDS, found, strict=False)) if is_sharded else dict.fromkeys(["model.safetensors"], "")
    for file, name in files.items():
        save_file({name: found[name]} if name else found, folder / file, {"format": "pt"})
    if is_sharded:
        index = {"metadata": {}, "weight_map": {name: file for file, name in files.items()}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "STABLE").touch()
    shutil.rmtree(launch.broadcasts_dir / f"step_{step - 2}", ignore_errors=True)
    return folder


def kept(launch: Launch) -> list[str]:
    return sorted(path.name for path in (launch.prime_dir / "recent").iterdir())


@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_mean_is_that_of_the_last_steps_in_float32(launch: Launch, is_sharded: bool) -> None:
    recent = Recent(launch, os.environ)
    for step in range(6):
        folder = publish(launch, step, is_sharded=is_sharded)
        recent.look()
        if step:
            name = next(folder.glob("*.safetensors")).name
            assert (launch.prime_dir / "recent" / folder.name / name).samefile(folder / name)  # no copy
    assert kept(launch) == ["step_3", "step_4", "step_5"]
    mean = recent.final(5)
    assert recent.averaged == (3, 4, 5)
    found = {name: tensor for path in mean.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for name, seed in (("a.weight", 0), ("b.weight", 1)):
        exact = torch.stack([values(step, seed).double() for step in (3, 4, 5)]).mean(0)
        assert (found[name].dtype == torch.bfloat16) is (seed == 0)
        assert torch.equal(found[name], exact.float().to(found[name].dtype)) or seed == 1
        assert (found[name].double() - exact).abs().max() < (2**-8 if seed == 0 else 1e-6)
    check_weights(mean)
    assert living_children() == []


def test_of_fewer_steps_the_last_weights_stand_for_themselves(launch: Launch) -> None:
    recent = Recent(launch, os.environ)
    for step in range(3):  # the base model and two steps
        folder = publish(launch, step)
        recent.look()
    assert (recent.final(2), recent.averaged) == (folder, ())
    off = Recent(replace(launch, score_last=0), os.environ)
    publish(launch, 3)
    off.look()
    assert kept(launch) == ["step_1", "step_2"]


def test_of_a_game_a_step_of_each_fifth_is_kept_besides(launch: Launch) -> None:
    settings = copy.deepcopy(dict(launch.settings))
    settings["orchestrator"]["train"]["source"][0]["env"]["opponent"] = {}
    for score_last, last in ((0, []), (3, [18, 19, 20])):
        shutil.rmtree(launch.prime_dir)
        launch.broadcasts_dir.mkdir(parents=True)
        recent = Recent(replace(launch, settings=settings, score_last=score_last), os.environ)
        for step in range(21):
            publish(launch, step)
            recent.look(step / 20)
        assert sorted(recent.earlier) == [4, 8, 12, 16]
        assert kept(launch) == sorted(f"step_{step}" for step in (4, 8, 12, 16, *last))
        for step, folder in recent.earlier.items():
            assert torch.equal(load_file(folder / "model.safetensors")["a.weight"], values(step))
        recent.final(20)
        assert recent.averaged == tuple(last)


def test_a_step_that_is_being_deleted_is_no_step(launch: Launch) -> None:
    recent = Recent(launch, os.environ)
    for step in (1, 2, 3, 4, 5):
        folder = publish(launch, step, is_sharded=True)
        if step == 4:
            (folder / SHARDS[1]).unlink()
        recent.look()
    assert kept(launch) == ["step_2", "step_3", "step_5"]
    recent.final(5)
    assert recent.averaged == (2, 3, 5)  # which Rules.unlike_asked tells


def test_looking_while_the_trainer_publishes_and_deletes(launch: Launch, tmp_path: Path) -> None:
    source, recent = full(tmp_path / "source"), Recent(launch, os.environ)
    argv = [sys.executable, "-I", "-c", TRAIN, launch.broadcasts_dir, source / "model.safetensors"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as trainer:
        trainer.stdout.readline()
        for _ in range(300):
            recent.look()
        trainer.kill()
    step = latest_stable(launch.broadcasts_dir)
    assert step
    sha256 = check_weights(recent.final(step))
    assert recent.averaged[-1] == step
    assert [check_weights(launch.prime_dir / "recent" / f"step_{each}") for each in recent.averaged] == [sha256] * 3


@pytest.mark.parametrize(
    ("tensors", "cause"),
    [
        ({"c.weight": torch.ones(1)}, r"c\.weight is not in the weights of every step"),
        ({"a.weight": torch.ones(1, 8, dtype=torch.bfloat16)}, r"a tensor is \[1, 8\] at one step and \[4, 8\] before"),
        ({"a.weight": torch.full((4, 8), torch.inf)}, "the weights are not finite"),
    ],
)
def test_weights_that_have_no_mean_are_one_line(launch: Launch, tensors: dict[str, torch.Tensor], cause: str) -> None:
    recent = Recent(launch, os.environ)
    for step in (1, 2, 3):
        publish(launch, step, **(tensors if step == 3 else {}))
        recent.look()
    with pytest.raises(EngineError, match=f"the averager ended: exit code 1: ValueError: {cause}") as raised:
        recent.final(3)
    assert "\n" not in str(raised.value)
    assert recent.averaged == ()
    assert living_children() == []

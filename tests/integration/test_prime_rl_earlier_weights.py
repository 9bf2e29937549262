"""The earlier weights of a self-play run: real files and real links, beside a trainer that publishes and deletes."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nightshift.engines.prime_rl.weights import EarlierWeights


@pytest.fixture
def broadcasts(tmp_path: Path) -> Path:
    folder = tmp_path / "broadcasts"
    folder.mkdir()
    return folder


def publish(broadcasts: Path, step: int) -> Path:
    """As prime-rl's trainer does: the files, then STABLE; then step N-2 is deleted."""
    folder = broadcasts / f"step_{step}"
    folder.mkdir()
    save_file({"a.weight": torch.full((4, 8), float(step))}, folder / "model.safetensors", {"format": "pt"})
    (folder / "STABLE").touch()
    shutil.rmtree(broadcasts / f"step_{step - 2}", ignore_errors=True)
    return folder


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "earlier").iterdir())


def test_one_step_of_each_fifth_but_the_first_is_kept(broadcasts: Path, tmp_path: Path) -> None:
    earlier = EarlierWeights(broadcasts, tmp_path / "earlier")
    for step in range(21):
        publish(broadcasts, step)
        earlier.look(step / 20)
    assert list(earlier.folders) == [4, 8, 12, 16]
    assert kept(tmp_path) == sorted(f"step_{step}" for step in (4, 8, 12, 16))
    for step, folder in earlier.folders.items():
        assert torch.equal(load_file(folder / "model.safetensors")["a.weight"], torch.full((4, 8), float(step)))


def test_a_step_that_is_being_deleted_is_passed_over_and_what_is_kept_is_a_link(broadcasts, tmp_path):
    earlier = EarlierWeights(broadcasts, tmp_path / "earlier")
    publish(broadcasts, 0)
    earlier.look(0.25)
    assert earlier.folders == {}, "the base model is no step"
    whole = publish(broadcasts, 4) / "model.safetensors"
    (publish(broadcasts, 5) / "model.safetensors").unlink()
    earlier.look(0.3)
    assert list(earlier.folders) == [4]
    assert kept(tmp_path) == ["step_4"]
    assert (earlier.folders[4] / "model.safetensors").samefile(whole)

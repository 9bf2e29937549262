"""Only weights that are whole, and were published in time, are evaluated; only a complete folder is ever kept."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from nightshift.campaign.records import JOB_NAME, RESULT_NAME, Job
from nightshift.engines.prime_rl import metrics
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.prime_rl.metrics import MAX_TEXT, keep_rollouts
from nightshift.engines.prime_rl.remains import clean, sweep
from nightshift.engines.prime_rl.weights import build_model_folder, check_weights, latest_stable
from nightshift.errors import EngineError, NightshiftError
from nightshift.files import write_json
from tests.rules import GSM8K_PRIME_RL, ROOT

RECORDED = Path(__file__).parents[1] / "fixtures" / "prime_rl"


def full(folder: Path, seed: int = 0) -> Path:
    """As P/utils/weights.py writes one shard."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.full((4, 8), seed, np.float16) for name in ("model.embed_tokens.weight", "model.norm.weight")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sharded(folder: Path) -> Path:
    """As P/utils/weights.py writes several shards: numbered files, then the index."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number in (1, 2, 3):
        name = f"model-{number:05d}-of-00003.safetensors"
        save_file({f"layers.{number}.weight": np.ones((4, 8), np.float16)}, folder / name)
        weight_map[f"layers.{number}.weight"] = name
    index = {"metadata": {"total_size": 192}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def adapter(folder: Path) -> Path:
    """As P/trainer/lora.py and P/transports/weights/filesystem.py write a LoRA broadcast."""
    folder.mkdir(parents=True)
    save_file(
        {"base_model.layers.0.q_proj.lora_A.weight": np.ones((2, 8), np.float16)}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"}')
    return folder


def publish(folder: Path) -> None:
    """The empty markers that a broadcast carries, STABLE last."""
    for name in ("NCCL_READY", "STABLE"):
        (folder / name).touch()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A snapshot as the hub's cache lays it out: links to blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "7ae5"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE"):
        (blobs / name).write_text(f"{name} of the base")
        (snapshot / name).symlink_to(blobs / name)
    for name in ("model.safetensors", "README.md", ".gitattributes"):
        (snapshot / name).write_text("not wanted")
    return snapshot


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_last_step_that_is_published_is_taken(tmp_path: Path) -> None:
    for step in (0, 8, 9, 10, 11):
        publish(full(tmp_path / f"step_{step}", step))
    os.utime(tmp_path / "step_11" / "STABLE", (1.0, 1.0))  # the clock was set back meanwhile
    full(tmp_path / "step_12")  # still being written: no STABLE
    (tmp_path / "step_13").touch()
    (tmp_path / "step_x").mkdir()
    (tmp_path / "xstep_99").mkdir()
    assert latest_stable(tmp_path) == 11
    assert [latest_stable(tmp_path / name) for name in ("step_12", "missing")] == [None, None]


@pytest.mark.parametrize("make", [full, sharded, adapter])
def test_whole_weights_are_hashed_over_names_and_bytes(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "step_1")
    publish(folder)
    names = sorted(names_in(folder) - {"STABLE", "NCCL_READY"})
    # the docstring's promise: anyone can check it with coreutils
    environment = {"LC_ALL": "C", "PATH": os.environ["PATH"]}
    command = ["sha256sum", *names]
    listing = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True).stdout
    assert hashlib.sha256(listing).hexdigest() == check_weights(folder)
    assert check_weights(make(tmp_path / "again")) == check_weights(folder)


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = full(tmp_path / "step_1") / "model.safetensors"
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(EngineError, match=r"the weights in .* are incomplete"):
            check_weights(path.parent)
    path.write_bytes(data + b"\0")
    with pytest.raises(EngineError, match="incomplete"):
        check_weights(path.parent)


def misplace(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-00001-of', '"../model-00001-of'))


@pytest.mark.parametrize(
    ("make", "spoil"),
    [
        (sharded, lambda folder: (folder / "model-00002-of-00003.safetensors").unlink()),
        (sharded, misplace),
        (adapter, full),
    ],
)
def test_shards_and_adapters_that_are_not_whole_are_refused(tmp_path: Path, make: Any, spoil: Any) -> None:
    folder = make(tmp_path / "step_1")
    spoil(folder)
    with pytest.raises(EngineError, match="incomplete"):
        check_weights(folder)


def test_a_model_folder_is_the_weights_with_what_the_base_model_has_beside_its_own(tmp_path: Path, base: Path) -> None:
    source, target = full(tmp_path / "step_7"), tmp_path / "run-1" / "weights"
    publish(source)
    (source / "model.safetensors").chmod(0o600)  # as safetensors writes it
    left = target.parent / ".weights.tmp"  # by a kill
    left.mkdir(parents=True)
    (left / "model-00001-of-00002.safetensors").write_text("half")
    sha256 = build_model_folder(source, base, target)
    beside = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE"}
    assert names_in(target) == {"model.safetensors", *beside}
    assert sha256 == check_weights(source)
    assert (target / "model.safetensors").samefile(source / "model.safetensors")  # a link costs no gigabyte
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {target.stat().st_mode & 0o666}
    assert not (target / "config.json").is_symlink()
    assert (target / "config.json").read_text() == "config.json of the base"
    shutil.rmtree(source)  # as the trainer does two steps later
    assert check_weights(target) == sha256
    assert names_in(target.parent) == {"weights"}


def test_an_adapter_folder_names_its_base_model_and_has_no_config_of_its_own(tmp_path: Path, base: Path) -> None:
    target = tmp_path / "weights"
    build_model_folder(adapter(tmp_path / "step_7"), base, target)
    assert names_in(target) == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "LICENSE"
    }  # fmt: skip
    assert json.loads((target / "adapter_config.json").read_text())["base_model_name_or_path"].startswith("Qwen/")


@pytest.mark.parametrize("gone", ["step_7/model.safetensors", "blobs/config.json", None])
def test_no_half_made_folder_is_left_and_none_is_replaced(tmp_path: Path, base: Path, gone: str | None) -> None:
    source, target = full(tmp_path / "step_7"), tmp_path / "run-1" / "weights"
    target.parent.mkdir()
    if gone:
        (tmp_path / gone).unlink()  # as the trainer does, or a user who empties the cache
    else:
        target.mkdir()
        (target / "keep").touch()
    with pytest.raises(NightshiftError):
        build_model_folder(source, base, target)
    assert names_in(target.parent) == (set() if gone else {"weights"})
    assert gone or names_in(target) == {"keep"}


def kept(rollouts_dir: Path, path: Path) -> list[dict[str, Any]]:
    keep_rollouts(rollouts_dir, path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_recorded_rollouts_are_sampled_from_the_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(kept(RECORDED / "rollouts", tmp_path / "all.jsonl")) == 10
    monkeypatch.setattr(metrics, "NUM_ROLLOUTS", 4)
    samples = kept(RECORDED / "rollouts", tmp_path / "few.jsonl")
    assert [sample["step"] for sample in samples] == [6, 1, 1, 1]
    first = json.loads((RECORDED / "rollouts/step_1/train/all/traces.jsonl").read_text().splitlines()[0])
    (trace,) = first["traces"]
    assert samples[1] == {
        "step": 1,
        "problem": trace["task"]["data"]["prompt"],
        "completion": trace["nodes"][-1]["message"]["content"],
        "reward": 0.5 * trace["rewards"]["digits"]["score"] + trace["rewards"]["exact"]["score"],
        "truncated": trace["calls"][-1]["finish_reason"] == "length",
    }
    assert len({json.dumps(sample) for sample in samples}) == 4
    assert kept(tmp_path, tmp_path / "none.jsonl") == []


def episode(content: object, **changes: object) -> bytes:
    messages = {"role": "user", "content": "q"}, {"role": "assistant", "content": content}
    told = {"rewards": {"correct": {"score": 1.0, "weight": 1.0}}, "calls": [{"finish_reason": "length"}], **changes}
    return json.dumps({"traces": [{"nodes": [{"message": each} for each in messages], **told}]}).encode() + b"\n"


def test_hostile_rollouts_are_small_and_printable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "NUM_ROLLOUTS", 100)
    path = tmp_path / "step_3/train/all/traces.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(
        episode("\x1b[31m\x00\ud800 #### 7\n\u202e" + "x" * 10**6)
        + b"\xff\xfe\n[]\n{}\nnull\n" + b"[" * 10**5 + b"\n"
        + b"y" * (5 << 20) + b"\n"
        + b'{"traces": []}\n{"traces": [{"nodes": {}}]}\n{"traces": [{"nodes": [{"message": 3}]}]}\n'
        + episode(None, rewards=None, calls=None)
        + episode([{"type": "text", "text": "part"}], rewards={"a": None}, stop_condition="max_turns", calls=[])
    )  # fmt: skip
    samples = kept(tmp_path, tmp_path / "kept.jsonl")
    assert [(s["reward"], s["truncated"]) for s in samples] == [(1.0, True), (None, False), (None, True)]
    assert len(samples[0]["completion"]) == MAX_TEXT
    assert samples[0]["completion"].startswith(" [31m   #### 7\n x")
    assert [s["completion"] for s in samples[1:]] == ["", "part"]


JOB = Job(GSM8K_PRIME_RL, "rules", {}, 1, 100.0, token="1f")
ALL = ["broadcasts", "rollouts", "configs"]
LIGHT = ["configs"]


def make_run(folder: Path, job: Job = JOB, attempt: str = ".") -> Path:
    """The folder of a run whose worker was killed."""
    for name in ALL:
        (folder / attempt / "prime-rl" / name / "step_3").mkdir(parents=True)
    write_json(folder / JOB_NAME, job)
    return folder


def left(folder: Path, attempt: str = ".") -> list[str]:
    return [name for name in ALL if (folder / attempt / "prime-rl" / name).is_dir()]


@pytest.mark.parametrize(("place", "attempt"), [("0001", "."), ("0001", "incumbent"), ("certify/0001/a-7", ".")])
def test_the_next_start_deletes_what_a_kill_left(tmp_path: Path, place: str, attempt: str) -> None:
    folder = make_run(tmp_path / "runs" / place, attempt=attempt)
    engine = PrimeRlEngine(GSM8K_PRIME_RL, ROOT, {})
    engine.root = tmp_path
    engine.prepare_at_start(print)
    assert left(folder, attempt) == LIGHT


def test_runs_in_flight_stay(tmp_path: Path) -> None:
    unclear, local = make_run(tmp_path / "0004"), make_run(tmp_path / "0003")
    (unclear / JOB_NAME).write_bytes(b"{}")
    in_slurm = make_run(tmp_path / "0002", replace(JOB, name="nightshift-2"))
    sweep(tmp_path)
    assert [left(folder) for folder in (unclear, in_slurm, local)] == [ALL, ALL, LIGHT]
    (in_slurm / RESULT_NAME).touch()
    sweep(tmp_path)
    assert [left(folder) for folder in (unclear, in_slurm)] == [ALL, LIGHT]
    lost, other = (make_run(tmp_path / name, replace(JOB, name=name)) for name in ("0005", "0006"))
    clean(tmp_path, lost)  # in a night, which knows that this job in SLURM is over
    assert [left(folder) for folder in (lost, other)] == [LIGHT, ALL]


def test_no_link_leads_out_of_runs(tmp_path: Path) -> None:
    outside, runs = make_run(tmp_path / "outside"), tmp_path / "runs"
    folders = [runs / f"{number:04d}" for number in range(1, 4)]
    for folder in folders[1:]:
        folder.mkdir(parents=True)
        write_json(folder / JOB_NAME, JOB)
    folders[0].symlink_to(outside)  # the whole folder
    (folders[1] / "prime-rl").symlink_to(outside / "prime-rl")
    (folders[2] / "prime-rl").mkdir()
    (folders[2] / "prime-rl" / "broadcasts").symlink_to(outside / "prime-rl" / "broadcasts")
    sweep(runs)
    assert left(outside) == ALL

"""What a prime-rl run would start: golden plans, the recorded launcher, and that two runs share nothing.

The golden files in tests/fixtures/prime_rl/golden are written only by `NIGHTSHIFT_WRITE_GOLDEN=1 pytest
tests/unit/test_prime_rl_launch.py`; read their difference before it is committed.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nightshift.engines.prime_rl.launch import VALIDATOR, Launch, Ports, free_ports
from nightshift.errors import EngineError
from tests.prime_rl_plans import VARIANTS, launch_of, variant

FIXTURES = Path(__file__).parents[1] / "fixtures"
RUN_DIR = Path("/home/user/nightshift/runs/0007/run-1")


def golden(launch: Launch) -> dict[str, Any]:
    """A plan as JSON; the validator's place in this checkout is the only part that is not the same everywhere."""
    commands = [
        {
            "name": command.name,
            "argv": [word.replace(str(VALIDATOR), "<validator>") for word in command.argv],
            "env": dict(command.env),
            "log_name": f"{command.name}.log",
        }
        for command in launch.commands
    ]
    return {
        "served_model": launch.served_model,
        "commands": commands,
        "inference": launch.inference_json,
        "tree": launch.tree,
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_plan_of_a_shipped_configuration_is_the_golden_one(name: str) -> None:
    path = FIXTURES / "prime_rl" / "golden" / f"{name}.json"
    found = golden(launch_of(variant(name), RUN_DIR))
    if os.environ.get("NIGHTSHIFT_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(path.read_bytes())


# Colours in log files, and Weights & Biases, which is off.
LEFT_OUT = ("LOGURU_FORCE_COLORS", "WANDB_")


def bound(ports: Ports) -> tuple[int, ...]:
    """Every port that some process of a run binds."""
    return (ports.inference, ports.rollouts, ports.rollouts + 1, ports.env_server, ports.rendezvous)


def test_the_processes_are_those_that_prime_rl_s_own_launcher_was_recorded_to_start() -> None:
    commands = [command for command in launch_of(variant("train"), RUN_DIR).commands if command.name != "validator"]
    recorded = json.loads((FIXTURES / "prime_rl" / "launcher.json").read_bytes())
    for command, (argv, added) in zip(commands, recorded, strict=True):
        ours = [word.replace(f"{RUN_DIR}/configs", "<run>/configs") for word in command.argv]
        ours[0] = ours[0].rpartition("/")[2]
        ours = [re.sub(r"^(--rdzv-id=|--log-dir=).*", r"\1...", word) for word in ours]
        assert ours == [re.sub(r"^(--rdzv-id=|--log-dir=).*", r"\1...", word) for word in argv]
        wanted = {name: value for name, value in added.items() if not name.startswith(LEFT_OUT)}
        assert wanted.items() <= command.env.items()


def test_each_gpu_has_its_process_and_none_means_none() -> None:
    def devices(launch: Launch) -> dict[str, str | None]:
        return {command.name: command.env.get("CUDA_VISIBLE_DEVICES") for command in launch.commands}

    others = {"validator": None, "env-server": None, "orchestrator": None}
    assert devices(launch_of(variant("train"), RUN_DIR, gpu_ids=(2, 3))) == others | {"inference": "2", "trainer": "3"}
    assert devices(launch_of(variant("train"), RUN_DIR, gpu_ids=())) == others | {"inference": "", "trainer": ""}


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # one that nobody else has, whatever runs beside
        taken = server.getsockname()[1]
        monkeypatch.setattr("nightshift.engines.prime_rl.launch._PORT_RANGE", range(taken - 6, taken + 6))
        for _ in range(20):
            found = bound(free_ports())
            assert len(set(found)) == 5
            assert taken not in found


def test_no_free_port_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr("nightshift.engines.prime_rl.launch._PORT_RANGE", range(taken, taken + 1))
        with pytest.raises(EngineError, match=rf"no free port among {taken}-{taken + 1}\. See what listens"):
            free_ports()


@pytest.mark.parametrize("name", ["run 1", "a'b\"c", "$(touch x); #", "-rf", "é@{}[]*?", "\\n"])
def test_no_shell_sees_the_name_of_a_run_s_folder(name: str, tmp_path: Path) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for program in ("inference", "python", "env-server", "orchestrator", "torchrun"):
        script = bin_dir / program
        script.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv))\n")
        script.chmod(0o755)
    run_dir = tmp_path / name
    run_dir.mkdir()
    launch = launch_of(variant("train"), run_dir, bin_dir=bin_dir)
    launch.write()
    assert json.loads(launch.tree_path.read_bytes())["output_dir"] == str(run_dir)
    for command in launch.commands:
        result = subprocess.run(command.argv, cwd=run_dir, env=dict(command.env), capture_output=True, check=True)
        assert json.loads(result.stdout) == list(command.argv)
        assert any(str(run_dir) in word for word in command.argv)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["bin", name])


def test_paths_are_absolute(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="relative path"):
        launch_of(variant("train"), Path("runs/0001/run-1"))
    with pytest.raises(ValueError, match="relative path"):
        launch_of(variant("train"), tmp_path, bin_dir=Path("bin"))

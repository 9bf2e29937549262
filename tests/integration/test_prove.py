"""`prepare.py --prove` in checkouts of their own: each row fails by a stand-in, then holds, and is not run again.

The cards, uv, prime-rl's programs and TRL's trainer are stand-ins; git, the commands and the files are real.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nightshift.engines.prime_rl.install import Pins
from nightshift.executors import network
from nightshift.experiment.prove import STEPS
from tests import stand_in_prime_rl
from tests.checkouts import CAMPAIGN, ROOT, git, leftovers, make_checkout, python, site_packages
from tests.integration.conftest import ORG, with_stand_in_uv
from tests.stand_ins import fault
from tests.waiting import wait_for

CONFIG = "max_steps = 12\n[orchestrator]\nbatch_size = 16\ngroup_size = 4\n[trainer.optim]\nlr = 3e-6\n"
RULES = 'environments = ["arithmetic"]\nmodel = "mine"\n'
CARD = {"used_gb": 0.5, "total_gb": 80.0}
UNREADABLE = {"used_gb": None, "total_gb": None}
SECRETS = {"USER": "aliceliddell", "WANDB_API_KEY": "hunter2hunter2"}


class Machine:
    """A checkout on a machine with two stand-in cards."""

    def __init__(self, folder: Path, engine: str, environ: Mapping[str, str]) -> None:
        self.root, self.engine = folder / "checkout", engine
        self.environ = {**os.environ, **SECRETS, "XDG_CACHE_HOME": str(folder / "cache"), **environ}
        self.root.mkdir(parents=True)
        shutil.copy2(ROOT / "prepare.py", self.root)
        shutil.copytree(ROOT / "models" / "arithmetic-base", self.root / "mine")
        config = json.loads((self.root / "mine" / "config.json").read_bytes()) | {"max_position_embeddings": 32768}
        (self.root / "mine" / "config.json").write_text(json.dumps(config))
        make_checkout(self.root, CAMPAIGN, CONFIG, stand_in=True)
        (self.root / "rules.toml").unlink()
        (self.root / "rules.toml").write_text(RULES)
        sizes = self.root / "environments" / "arithmetic" / "pyproject.toml"
        sizes.write_text(sizes.read_text().replace("num_validation = 4000", "num_validation = 16"))
        shutil.copy2(ROOT / "tests" / "stand_in_nvml.py", site_packages(self.root) / "pynvml.py")
        self.cards(CARD, CARD)

    def cards(self, *cards: Mapping[str, float | None]) -> None:
        (site_packages(self.root) / "cards.json").write_text(json.dumps(cards))

    def commit(self) -> None:
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "-m", "a machine")

    def start(self, *flags: str) -> subprocess.Popen[str]:
        command = [python(self.root), "prepare.py", "--prove", "--engine", self.engine, *flags]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.root, env=self.environ, stdout=pipe, stderr=pipe, text=True)

    def prove(self, *flags: str) -> tuple[int, list[str]]:
        process = self.start(*flags)
        stdout, stderr = process.communicate()
        assert (stdout, leftovers(self.root)) == ("", [])
        return process.returncode, stderr.splitlines()

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        machines = json.loads((self.root / "proof.json").read_bytes())["machines"]
        return next((rows for name, rows in machines.items() if "no such" not in name), next(iter(machines.values())))

    def forget(self, row: str) -> None:
        """Take a row out of the file."""
        proof = json.loads((self.root / "proof.json").read_bytes())
        for rows in proof["machines"].values():
            rows.pop(row, None)
        (self.root / "proof.json").write_text(json.dumps(proof))

    def fails(self, row: str, line: str, code: int, *flags: str) -> None:
        """Assert that --prove fails at this row with this line and exit code, and that every row before it is shown."""
        found, lines = self.prove(*flags)
        entry = self.rows.get(row, {"figure": "", "is_shown": True})
        assert (found, entry["is_shown"], line in entry["figure"]) == (code, False, True), (lines, entry)
        assert any(line in text for text in lines), lines
        assert [name for name in self.names[: self.names.index(row)] if not self.rows[name]["is_shown"]] == []

    @property
    def names(self) -> list[str]:
        return [name for name in STEPS if self.engine in STEPS[name].engines]

    def is_proved(self, *flags: str) -> None:
        """Assert that --prove shows every row and keeps private words out of the file; once more it runs nothing."""
        code, lines = self.prove(*flags)
        assert code == 0, lines
        assert {name for name, row in self.rows.items() if row["is_shown"]} == {*self.names}
        text = (self.root / "proof.json").read_text()
        assert [word for word in (str(self.root.parent), socket.gethostname(), *SECRETS.values()) if word in text] == []
        code, lines = self.prove()
        assert (code, lines[0]) == (0, f"all {len(self.names)} rows are shown")


@pytest.mark.slow
def test_one_gpu_is_proved_with_trl_row_by_row(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "trl", {})
    machine.commit()
    machine.cards()
    machine.fails("driver and memory", "NVIDIA GPU, this machine has 0", 2)
    machine.cards(CARD)
    fault(machine.root, "error", once=False)
    machine.fails("ten training steps", "loss is nan at step 1", 2)
    (machine.root / "stand-in.json").unlink()
    shutil.rmtree(machine.root / "runs" / "smoke")
    process = machine.start("--smoke", "600")
    wait_for((machine.root / "runs" / "smoke" / "metrics.jsonl").exists)
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1].splitlines()[-1].startswith("stopped by SIGINT")
    assert (process.returncode, leftovers(machine.root)) == (130, [])
    machine.is_proved("--smoke", "1")
    for row, name, line in (
        ("the same baseline again", "error", "loss is nan at step 1"),
        ("kill and nothing left", "holds_card", "left after 10 s: GPU 0 (NVIDIA H100 80GB HBM3) has 40.0 of 80.0 GB"),
    ):
        machine.forget(row)
        fault(machine.root, name, once=False)
        machine.fails(row, line, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_gpus_are_proved_with_prime_rl_row_by_row(tmp_path: Path, upstream: tuple[Path, str]) -> None:
    environ = with_stand_in_uv(tmp_path, "fail")
    machine, short = Machine(tmp_path, "prime-rl", environ), ("--smoke", "5")
    pins, project = Pins.read(ROOT / "pyproject.toml"), machine.root / "pyproject.toml"
    text = project.read_text().replace(pins.repository, f"file://{upstream[0] / ORG}/prime-rl")
    project.write_text(text.replace(pins.commit, upstream[1]))
    venv = tmp_path / "cache" / "nightshift" / "prime-rl" / upstream[1] / ".venv"
    words = [sys.executable, str(ROOT / "tests" / "stand_in_prime_rl.py"), str(venv), "reader"]
    reader = machine.root / "nightshift" / "engines" / "prime_rl" / "reader.py"
    reader.write_text(f"import os, sys\nos.execv({words[0]!r}, [*{words!r}, *sys.argv[1:]])\n")
    machine.commit()
    machine.cards(CARD)
    machine.fails("driver and memory", "NVIDIA GPUs, this machine has 1", 2)
    machine.cards(CARD, CARD)
    machine.fails("install", "The lockfile at `uv.lock` needs to be updated", 2)
    machine.environ["UV_STAND_IN"] = "run:serves_the_start"
    machine.fails("served = file", "the server did not serve the file", 2, *short)
    stand_in_prime_rl.misbehave(venv, None)
    smoke = venv.parent / ".nightshift" / "runs" / "smoke"
    shutil.rmtree(smoke)
    process = machine.start("--smoke", "600")
    wait_for((smoke / "prime-rl" / "broadcasts" / "step_3").exists)
    process.kill()
    process.communicate()
    wait_for(lambda: not leftovers(tmp_path), "the end of what was killed")
    machine.is_proved(*short)
    assert [*smoke.parent.iterdir()] == [smoke]  # of the one that was killed; the others leave nothing
    wanted = "shared" if network.problem() else "namespace of its own"  # as an experiment's
    assert machine.rows["server up"]["figure"].endswith(f"; network: {wanted}")
    machine.forget("memory peak")
    machine.cards(UNREADABLE, UNREADABLE)
    machine.fails("memory peak", "not measured", 1, *short)

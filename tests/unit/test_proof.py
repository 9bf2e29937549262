"""proof.json: what it keeps private, for which machine and code a row holds, and what it reads from records."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import EngineError, UsageError
from nightshift.experiment.prove import MachineProof, proving, public
from nightshift.waiting import mark
from tests.checkouts import linked_checkout
from tests.prime_rl_plans import SHIPPED
from tests.rules import GSM8K_TRL, ROOT
from tests.stand_in_nvml import Card, StandInNvml

CODE = "nightshift/executors/gpus.py"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> StandInNvml:
    nvml = StandInNvml([Card()])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = linked_checkout(tmp_path / "checkout", SHIPPED)
    (root / CODE).parent.mkdir(parents=True)
    shutil.copy2(ROOT / CODE, root / CODE)
    return root


def proof_of(root: Path) -> MachineProof:
    return MachineProof(root, TrlEngine(GSM8K_TRL, root, {}))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no file /home/al/x.log, see ~/.cache/y: 3 of 4", "no file <private>, see <private>: 3 of 4"),
        ("http://proxy.corp:8080/simple refused git@github.com:a/b", "<private> refused <private>"),
        ("10.1.2.3:80 is gone, driver 570.86.15", "<private>:80 is gone, driver 570.86.15"),
        ("aliceliddell at wonder1 (wonder1.corp)", "<private> at <private> (<private>)"),
        ("key hf_abcdefghijklmnop123456789 and hunter2hunter2", "key <private> and <private>"),
        ("GPU 0 (NVIDIA A100-SXM4-80GB) and/or 1/2 of a/b", "GPU 0 (NVIDIA A100-SXM4-80GB) and/or 1/2 of a/b"),
    ],
)  # fmt: skip
def test_no_private_word_is_in_a_line(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "aliceliddell")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2hunter2")
    monkeypatch.setattr("socket.gethostname", lambda: "wonder1.corp")
    assert public(text) == shown


def test_a_row_holds_for_one_code_driver_and_hardware(root: Path, nvml: StandInNvml) -> None:
    proof_of(root).mark("server up", "after 9 s")
    assert [row.figure for row in proof_of(root).rows.values()] == ["after 9 s"]
    nvml.cards[0].name = "NVIDIA A100"
    assert proof_of(root).rows == {}
    proof_of(root).mark("server up", "after 7 s")
    nvml.cards[0].name = "NVIDIA H100 80GB HBM3"
    assert proof_of(root).rows["server up"].figure == "after 9 s", "other hardware has rows of its own"
    for change in (lambda: setattr(nvml, "driver", "580.1"), lambda: (root / CODE).write_text("# other\n")):
        change()
        assert proof_of(root).rows == {}
        proof_of(root).mark("memory peak", "2.0 GB")
        assert list(proof_of(root).rows) == ["memory peak"]
    machines = json.loads((root / "proof.json").read_bytes())["machines"]
    assert len(machines) == 4
    (root / "proof.json").write_text("{")
    with pytest.raises(UsageError, match=r"proof\.json is damaged: .*Delete it"):
        proof_of(root).mark("memory peak", "2.0 GB")


def test_a_figure_that_shows_too_little_replaces_none_that_shows_it(root: Path, nvml: StandInNvml) -> None:
    proof = proof_of(root)
    for figure, is_shown in (("3 steps", False), ("12 steps", True), ("5 steps", False)):
        proof.mark("ten training steps", figure, is_shown)
    assert [row.figure for row in proof.rows.values()] == ["12 steps"]


def test_an_error_fails_the_row_that_began_first(root: Path, nvml: StandInNvml) -> None:
    def fail() -> None:
        with proving(root, TrlEngine(GSM8K_TRL, root, {})):
            mark("driver and memory")
            mark("driver and memory", "one card")
            mark("compile caches")
            mark("server up")
            raise EngineError("no kernel in /opt/x.so", "Mend it.")

    with pytest.raises(EngineError):
        fail()
    mark("memory peak", "2.0 GB")  # nobody writes
    rows = proof_of(root).rows
    assert {name: (row.is_shown, row.figure) for name, row in rows.items()} == {
        "driver and memory": (True, "one card"),
        "compile caches": (False, "no kernel in <private>"),
    }


def test_no_row_is_written_where_the_rules_use_no_gpu(root: Path) -> None:
    rules = replace(GSM8K_TRL, num_gpus=0)
    MachineProof(root, TrlEngine(rules, root, {})).mark("server up", "after 9 s")
    assert not (root / "proof.json").exists()

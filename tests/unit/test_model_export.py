"""`export --to model`: what is copied of a folder that anybody may have written, and that transformers loads it."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Change, Estimate, Job, Weights
from nightshift.errors import EngineError, UsageError
from nightshift.files import write_json
from nightshift.report.data import Story
from nightshift.report.export.model import copy_model
from tests.campaigns import BRANCH, campaign, certificate_for, replace, with_certificate
from tests.rules import ARITHMETIC_TRL

BASE = Path(__file__).parents[2] / "models" / "arithmetic-base"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A baseline, a keep and a discard; the two that were kept have a model, which is the one that was scored."""
    ledger = Ledger(tmp_path / "root")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "models").symlink_to(BASE.parent)
    rules_hash = ARITHMETIC_TRL.hash(tmp_path / "root")
    records = [replace(each, rules_hash=rules_hash) for each in campaign(ledger, ["3e-6", "1e-5"])]
    for each in records:
        ledger.write(each)
    digest = hashlib.sha256((BASE / "model.safetensors").read_bytes()).hexdigest()
    for record in records[:2]:
        shutil.copytree(BASE, ledger.run_dir(record.number) / "model")
        run = record.result
        assert run.evaluation is not None
        scored = replace(run, evaluation=replace(run.evaluation, weights=Weights(40, digest)))
        ledger.write(replace(record, result=scored))
        job = Job(ARITHMETIC_TRL, rules_hash, {}, scored.seed, 100.0, token="1f")
        folder = ledger.run_dir(record.number)
        write_json(folder / "job.json", job)
    return ledger


def exported(ledger: Ledger, target: Path, number: int | None = None) -> Path:
    story = Story.of(Ledger(ledger.tsv_path.parent), BRANCH)
    return copy_model(story, number, target)


@pytest.mark.slow
def test_the_incumbents_model_is_loaded_by_transformers_and_answers(ledger: Ledger, tmp_path: Path) -> None:
    exported(ledger, tmp_path / "out")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    messages = [{"role": "user", "content": "Tom has 3 apples and gets 4 more. How many apples has Tom?"}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = network.generate(**asked, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(answer[0][asked["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_the_card_says_how_it_was_made_and_what_was_certified(ledger: Ledger, tmp_path: Path) -> None:
    assert exported(ledger, tmp_path / "out") == tmp_path / "out"
    card = (tmp_path / "out" / "README.md").read_text()
    for said in (
        "# Experiment 0002 of test", "Base model: models/arithmetic-base. Its licence applies", "on arithmetic.",
        "steps: 40", "    trainer.optim.lr 6e-7 -> 3e-6", "0.6000 (standard error over its",
        "Not certified yet: nothing was measured on the test split", "library_name: transformers",
    ):  # fmt: skip
        assert said in card.replace("\\", ""), said
    assert str(tmp_path) not in card
    with_certificate(ledger, certificate_for(ledger, estimate=Estimate(0.25, 0.1, 9.0, (0.1, 0.4))))
    told = (exported(ledger, tmp_path / "best") / "README.md").read_text().replace("\\", "")
    assert "- Other runs of this config: Certified on " in told
    assert "+25.0 pp, 95 % interval +10.0 to +40.0 pp: better" in told
    assert (
        "Not certified: no certificate compares its config."
        in (exported(ledger, tmp_path / "1", 1) / "README.md").read_text()
    )


def test_a_model_of_another_config_is_not_taken_for_the_incumbents(ledger: Ledger, tmp_path: Path) -> None:
    keep = ledger.record(2)
    rider = Change(experiment=3, keys={"trainer.optim.weight_decay": "0.1"})
    ledger.write(replace(keep, run=replace(keep.run, rider=rider)))
    with pytest.raises(UsageError, match=r"has no run of exactly the incumbent\. Train it: .* --experiment NNNN"):
        exported(ledger, tmp_path / "out")
    assert exported(ledger, tmp_path / "out", 2).is_dir()


def _swap(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-4] + b"\0\0\0\0")


def _name_code(folder: Path, escaped: str = '"a', **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys).replace('"a', escaped))


AUTO_MAP = {"auto_map": {"AutoModel": "evil/repo--modeling.Evil"}}


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (_swap, "0002"),
        (shutil.rmtree, "the weights of experiment 0002 are gone"),
        (partial(_name_code, escaped='"\\u0061', **AUTO_MAP), 'config.json has "auto_map"'),
        (partial(_name_code, temperature=float("nan"), **AUTO_MAP), "config.json: "),
        (partial(_name_code, deep=[{"custom_generate": "x"}]), 'has "custom_generate"'),
    ],
)
def test_a_planted_model_is_refused_whole(ledger, tmp_path, plant, said):
    plant(ledger.run_dir(2) / "model")
    with pytest.raises((EngineError, UsageError), match=said):
        exported(ledger, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_code_and_pickles_beside_the_weights_stay_behind(ledger: Ledger, tmp_path: Path) -> None:
    folder = ledger.run_dir(2) / "model"
    for name in ("modeling.py", "pytorch_model.bin", ".hidden.json", "README.md"):
        (folder / name).write_text("import os")
    (folder / "sub").mkdir()
    exported(ledger, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in BASE.iterdir()}
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\n")


def test_no_free_text_and_no_path_is_in_the_card(ledger: Ledger, tmp_path: Path) -> None:
    record = ledger.record(2)
    said = f"```\n# Certified | <script>alert(1)</script> [x](http://y)\n--- {tmp_path}"
    ledger.write(replace(record, description=said, health=said, hardware="cpu"))
    source = ledger.run_dir(2) / "train.toml"
    source.write_text(f"# {said.splitlines()[-1]}\n{source.read_text()}")
    path = ledger.run_dir(2) / "job.json"
    path.write_text(path.read_text().replace("models/arithmetic-base", f"{tmp_path}/models/mine"))
    exported(ledger, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Base model: a local folder." in card
    assert str(tmp_path) not in card
    assert "Certified |" not in card

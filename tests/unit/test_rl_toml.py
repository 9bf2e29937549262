"""export --to rl.toml: it has every value that the engine composes for a run, in names of prime-rl's own class."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nightshift.campaign.records import Job
from nightshift.cli import run
from nightshift.cli.main import commands
from nightshift.config.allowlist import CURRICULUM
from nightshift.config.import_config import import_config
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import Config, parse, set_values
from nightshift.errors import UsageError
from nightshift.files import write_json
from nightshift.report.data import Story
from nightshift.report.export.rl_toml import as_rl_toml, edited, rl_toml
from tests.campaigns import replace
from tests.checkouts import ROOT, git
from tests.prime_rl_plans import SHIPPED, VARIANTS, launch_of, leaves, open_configs, variant
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL
from tests.stand_in_campaign import BRANCH, build
from tests.unit.test_prime_rl_effective import RUN_DIR, disagreements

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
BOTH, GAME = (
    rules_of(ROOT, Chosen(environments=names, model=MODEL), "prime-rl", 2)
    for names in (["gsm8k", "arithmetic"], ["tictactoe"])
)
SCALED = replace(GSM8K_PRIME_RL, learning_rate_scale=20.0)
POOLS = {f"{CURRICULUM}.sampler.type": "difficulty_pool"}
CONFIGS: dict[str, tuple[Rules, Config]] = {
    **{name: (GSM8K_PRIME_RL, config) for name, config in open_configs().items()},
    **{name: (GSM8K_PRIME_RL, variant(name)) for name in VARIANTS},
    "two environments": (BOTH, parse(set_values(SHIPPED, {"orchestrator.train.ratio.gsm8k": 3.0}))),
    "a game": (GAME, parse(set_values(SHIPPED, {"orchestrator.train.opponent.temperature": 0.7}))),
    "pools": (GSM8K_PRIME_RL, parse(set_values(SHIPPED, POOLS))),
    "a scale": (SCALED, parse(set_values(SHIPPED, VARIANTS["max_steps"] | {"trainer.scheduler.min_lr": 1e-7}))),
}
# What belongs to one run under Nightshift, and changes nothing that is learned.
OWN = re.compile(
    r"output_dir|run\.name|clean|rollout_transport\.\w+|inference\.server\.\w+|(trainer|orchestrator)\.monitors\..*"
    r"|orchestrator\.env_server_base_port|orchestrator\.model\.client\.base_url"
)


def with_null(node: Any) -> Any:
    """Return tables with null in place of "None"."""
    if isinstance(node, list):
        return [with_null(item) for item in node]
    if isinstance(node, dict):
        return {name: with_null(value) for name, value in node.items()}
    return None if node == "None" else node


def exported(rules: Rules, config: Config) -> dict[str, Any]:
    settings = launch_of(config, RUN_DIR, rules=rules).settings
    tables: dict[str, Any] = with_null(tomllib.loads(rl_toml(settings, 1003, ["x"]).decode()))
    return tables


def test_an_export_has_every_value_of_a_run_but_its_folders_and_ports() -> None:
    for name, (rules, config) in CONFIGS.items():
        values = dict(leaves(launch_of(config, RUN_DIR, seed=1003, rules=rules).tree))
        export = exported(rules, config)
        assert dict(leaves(export)) == {path: value for path, value in values.items() if not OWN.fullmatch(path)}, name
        if rules is not GAME:  # its environment's class has more keys, which test_prime_rl_validation.py reads
            assert disagreements(export) == {}, name


@pytest.mark.parametrize("name", VARIANTS)
def test_an_export_can_be_imported_again(name: str) -> None:
    rules, config = CONFIGS[name]
    again = import_config(rl_toml(launch_of(config, RUN_DIR, rules=rules).settings, 1, []), "rl.toml").values
    assert {path: again.get(path) for path in config.values} == config.values


def story_of(root: Path, rules: Rules | None) -> Story:
    """Build a campaign of 12 experiments in a checkout of its own, measured under `rules`; None: without rules."""
    for name in ("environments", "models", "pyproject.toml"):
        (root / name).symlink_to(ROOT / name)
    rules_hash = rules.hash(root) if rules else "0" * 12
    ledger = build(root, 12, num_examples=100, rules_hash=rules_hash)
    for record in ledger.records() if rules else ():
        path = ledger.run_dir(record.number) / "job.json"
        seed = record.result.seed if record.result else 1
        write_json(path, Job(rules, rules_hash, {}, seed, 100.0, token="1f"))
    return Story.of(ledger, BRANCH)


def test_export_writes_an_experiment_and_the_incumbent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = story_of(tmp_path, SCALED)
    monkeypatch.setattr(run, "process_root", lambda: tmp_path)
    text = CliRunner().invoke(commands, ["export", "--to", "rl.toml", "--output", "-", "--experiment", "1"]).stdout
    record, tree = story.records[0], tomllib.loads(text)
    assert tree["trainer"]["optim"]["lr"] == pytest.approx(20 * story.configs[1].get("trainer.optim.lr"))
    assert tree["inference"]["vllm"]["seed"] == record.result.seed
    assert tree["model"] == {"name": SCALED.model}
    head = text.split("\n\n")[0]
    assert head.startswith(f"# experiment 0001 of {BRANCH}, for prime-rl 559b44772e")
    assert f"# trained for {record.result.training.num_steps} steps in a budget of 600 s" in head
    words = r"PYTHONPATH=\$PWD/\.nightshift/environments/[0-9a-f]{16} uv run --no-sync rl @ THIS_FILE --model\.name /"
    assert re.search(words, head)
    assert f"revision {SCALED.model_revision}" in head
    assert "train.toml times 20" in head
    assert str(tmp_path) not in text
    incumbent = as_rl_toml(story, None, tmp_path, {}).decode()
    assert incumbent.startswith(f"# the incumbent of {BRANCH}, ")
    assert tomllib.loads(incumbent)["orchestrator"]["renderer"] == {"name": "default"}


MINE = b"""\
# My own file.
max_steps = 20  # short
[model]
name = "a/b"
[monitors.wandb]
project = "mine"
[orchestrator]
batch_size = 64
[[orchestrator.train.source]]
group_size = 8
env.taskset = {id = "gsm8k", split = "main"}
[orchestrator.train.source.curriculum.gates.mixed]
[[orchestrator.train.source]]
env.taskset.id = "countdown"
"""
WITH_OLD_NAMES = b"""\
inference_gpu_ids = [0]
[orchestrator]
rollouts_per_example = 8
sampling = {max_tokens = 100, top_p = 0.9}
env = [{id = "gsm8k"}]
"""


@pytest.mark.parametrize(
    ("source", "changes", "edits", "comment"),
    [
        (
            MINE,
            {"trainer.optim.lr": 3e-6, "max_steps": None, "orchestrator.group_size": 4},
            {"trainer.optim.lr": 3e-6, "max_steps": None, "orchestrator.train.source[0].group_size": 4,
             "orchestrator.train.source[1].group_size": 4},
            "-max_steps 20",
        ),
        (
            WITH_OLD_NAMES,
            {"orchestrator.group_size": 16, "orchestrator.train.sampling.max_completion_tokens": 64},
            {"orchestrator.rollouts_per_example": 16, "orchestrator.sampling.max_tokens": 64},
            "also trained with (not in this file): trainer.loss.kl_tau = 0.0",
        ),
        (
            b"# My own file.\ntrainer.optim.lr = 1e-5 # my lr\nmax_steps = 20\n",
            {"trainer.optim.lr": 2e-5, "trainer.scheduler.type": "cosine", "trainer.model.lora.rank": 8},
            {"trainer.optim.lr": 2e-5, "trainer.scheduler.type": "cosine", "trainer.model.lora.rank": 8},
            "+trainer.scheduler.type cosine",
        ),
    ],
)  # fmt: skip
def test_an_imported_config_goes_out_as_the_users_file_with_the_kept_keys_changed(
    source: bytes, changes: dict[str, Any], edits: dict[str, Any], comment: str
) -> None:
    baseline = import_config(source, "rl.toml").train_toml("rl.toml")
    text = edited(source, parse(set_values(baseline, changes)), GSM8K_PRIME_RL, ["by me"]).decode()
    before, after = (dict(leaves(with_null(tomllib.loads(each)))) for each in (source.decode(), text))
    assert {path: after.get(path) for path in before | after if before.get(path) != after.get(path)} == edits
    assert text.startswith("# by me\n")
    assert f"# {comment}" in text.replace("#   ", "# ")
    assert all(comment in text for comment in ("# My own file.", "# my lr") if comment in source.decode())


FACTOR = WITH_OLD_NAMES + b"batch_size = 64\noversampling_factor = 2.0\n"


def imported_story(tmp_path: Path, source: bytes) -> Story:
    story = story_of(tmp_path, SCALED)
    (tmp_path / "imported.toml").write_bytes(source)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "imported.toml")
    git(tmp_path, "commit", "--quiet", "-m", "Import")
    (tmp_path / "imported.toml").write_bytes(b"# of another campaign")
    first = replace(story.records[0], commit=git(tmp_path, "rev-parse", "HEAD").strip())
    return replace(story, records=(first, *story.records[1:]))


def test_export_edits_the_file_that_the_campaign_began_with(tmp_path: Path) -> None:
    story = imported_story(tmp_path, MINE)
    text = as_rl_toml(story, 1, tmp_path, {}).decode()
    assert tomllib.loads(text)["monitors"] == {"wandb": {"project": "mine"}}
    assert tomllib.loads(text)["trainer"]["optim"]["lr"] == pytest.approx(20 * story.configs[1].get("trainer.optim.lr"))
    assert "# My own file." in text
    assert "rl @ THIS_FILE" not in text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"model = 'a/b'\nlearning_rate = 2e-6\nnum_generations = 8\n", "it is a config of "),
        (FACTOR, "a config of prime-rl before March 2026 cannot express: "),
    ],
)
def test_export_composes_where_the_imported_file_cannot_be_edited(tmp_path: Path, source: bytes, reason: str) -> None:
    text = as_rl_toml(imported_story(tmp_path, source), 1, tmp_path, {}).decode()
    assert "rl @ THIS_FILE" in text
    assert tomllib.loads(text)["model"] == {"name": SCALED.model}
    assert f"# the imported file is not used: {reason}" in text


@pytest.mark.parametrize(
    ("rules", "cause"),
    [
        (
            ARITHMETIC_TRL,
            "the incumbent was trained by the engine trl, and no prime-rl config reproduces this training",
        ),
        (None, r"the campaign's rules are unknown: runs/ has no readable job\.json"),
        (GSM8K_PRIME_RL, r"was trained under other rules .* Check out the campaign's branch: git switch auto"),
    ],
)
def test_export_refuses_what_prime_rl_did_not_train_by_these_rules(
    tmp_path: Path, rules: Rules | None, cause: str
) -> None:
    story = story_of(tmp_path, rules)
    (tmp_path / "nightshift").symlink_to(ROOT / "nightshift")
    with pytest.raises(UsageError, match=cause):
        as_rl_toml(story, None, tmp_path, {})

"""nightshift import: what becomes of each key of another config."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from nightshift.campaign.ledger import Ledger
from nightshift.cli.main import commands
from nightshift.config.import_config import import_config, merged
from nightshift.config.rules_toml import rules_here
from nightshift.config.train_toml import load, parse
from nightshift.errors import ConfigError, UsageError
from tests.campaigns import campaign
from tests.checkouts import ROOT, git

TODAY = b"""\
max_steps = 20
seq_len = 2048
trainer.model.seq_len = 4096
[model]
name = "an-owner/a-model"
[deployment]
num_train_gpus = 2
[orchestrator]
batch_size = 128
[orchestrator.train.sampling]
max_completion_tokens = 128
[orchestrator.renderer]
name = "default"
[[orchestrator.train.source]]
name = "gsm8k"
group_size = 16
[orchestrator.train.source.env.taskset]
id = "gsm8k"
[orchestrator.train.source.curriculum.gates.mixed]
[trainer.optim]
lr = 3e-6
[ckpt]
"""
AUTORESEARCH = b"""\
inference_gpu_ids = [0]
trainer_gpu_ids = [1]
max_steps = 20
[wandb]
offline = true
[model]
name = "Qwen/Qwen2.5-0.5B-Instruct"
[orchestrator]
batch_size = 256
rollouts_per_example = 4
[orchestrator.eval]
interval = 10
[[orchestrator.env]]
id = "an-owner/gsm8k"
[trainer.loss]
type = "default"
token_mask_high = 5.0
[trainer.optim]
lr = 3e-6
betas_1 = 0.8
eps = 1e-8
[inference]
[orchestrator.sampling]
max_tokens = 512
top_p = 0.9
[[orchestrator.pre_batch_filters]]
type = "zero_advantage"
"""
HOSTED = b"""\
model = "an-owner/a-model"
batch_size = 128
rollouts_per_example = 8
lora_alpha = 32
max_inflight_rollouts = 96
[sampling]
max_tokens = 1024
enable_thinking = false
[[env]]
id = "an-owner/reverse-text"
"""
GATES = "orchestrator.train.source.curriculum.gates"


@pytest.mark.parametrize(
    ("source", "values", "left_out"),
    [
        (
            TODAY,
            {"max_steps": 20, "seq_len": 2048, "orchestrator.batch_size": 128, "orchestrator.group_size": 16,
             "orchestrator.train.sampling.max_completion_tokens": 128, f"{GATES}.mixed": {}, "trainer.optim.lr": 3e-6},
            {"model.name": "rules", "deployment.num_train_gpus": "rules", "orchestrator.renderer.name": "rules",
             "orchestrator.train.source.name": "rules", "orchestrator.train.source.env.taskset.id": "rules",
             "ckpt": "harness",
             "trainer.model.seq_len": ""},
        ),
        (
            AUTORESEARCH,
            {"max_steps": 20, "orchestrator.batch_size": 256, "orchestrator.group_size": 4, "trainer.optim.lr": 3e-6,
             "trainer.loss.kl_tau": 0.0,
             "orchestrator.train.sampling.max_completion_tokens": 512},
            {"inference_gpu_ids": "rules", "trainer_gpu_ids": "rules", "wandb.offline": "harness",
             "model.name": "rules",
             "orchestrator.eval.interval": "rules", "orchestrator.env.id": "rules", "trainer.loss.token_mask_high": "",
             "trainer.loss.type": "", "trainer.optim.betas_1": "", "trainer.optim.eps": "nobody",
             "orchestrator.sampling.top_p": "nobody", "orchestrator.pre_batch_filters.type": ""},
        ),
        (
            HOSTED,
            {"max_steps": 100, "orchestrator.batch_size": 128, "orchestrator.group_size": 8, "trainer.optim.lr": 1e-4,
             "orchestrator.train.sampling.max_completion_tokens": 1024, "orchestrator.concurrency.max_inflight": 96,
             "trainer.model.lora": {}, "trainer.model.lora.alpha": 32.0},
            {"model": "rules", "sampling.enable_thinking": "nobody", "env.id": "rules"},
        ),
    ],
)  # fmt: skip
def test_research_keys_are_translated_and_every_other_key_has_an_owner(
    source: bytes, values: dict[str, object], left_out: dict[str, str]
) -> None:
    imported = import_config(source, "rl.toml")
    text = imported.train_toml("rl.toml")
    assert dict(parse(text).values) == values
    assert re.search(rb"^\w+ = .*\n\w+ = ", text, re.MULTILINE) is None  # git revert needs a line between two keys
    owners = {".".join(problem.path): problem.lock.owner if problem.lock else "" for problem in imported.left_out}
    assert owners == left_out
    report = "\n".join(imported.report())
    assert all(path in report for path in owners)


def test_values_that_mean_something_else_are_not_copied_and_are_said() -> None:
    report = "\n".join(
        import_config(AUTORESEARCH.replace(b"[trainer.loss]", b"[trainer.loss]\nkl_tau = 0.01"), "x").report()
    )
    assert "trainer.loss.kl_tau = 0.01 is not copied: it weighted the log ratio inside the advantage" in report
    assert "trainer.loss.kl_tau = 0.0: the default of prime-rl before March 2026 (today 0.001)" in report
    report = "\n".join(import_config(TODAY, "x").report())
    assert "trainer.model.seq_len = 4096 is not copied: seq_len is 2048 already" in report
    report = "\n".join(import_config(SOURCES, "x").report())
    assert 'train.source.algo.type = "opd" is now orchestrator.algo.type, which allows grpo' in report
    alone = import_config(b"[orchestrator]\nbatch_size = 64\n[trainer.scheduler]\nwarmup_steps = 5\n", "x")
    assert "trainer.scheduler.warmup_steps = 5 has no effect" in "\n".join(alone.report())


LORA = "trainer.model.lora"
GROUPS = b"[orchestrator]\nbatch_size = 64\ngroup_size = 8\n"


@pytest.mark.parametrize(
    ("source", "values", "report"),
    [
        (  # of late 2025: every key of the table is carried over, and the refused one is named
            b"[trainer.model.experimental.lora]\nrank = 8\nalpha = 16\nmodules_to_save = ['a']\n" + GROUPS,
            {LORA: {}, f"{LORA}.rank": 8, f"{LORA}.alpha": 16.0, "orchestrator.batch_size": 64,
             "orchestrator.group_size": 8},
            'trainer.model.experimental.lora.modules_to_save = ["a"] is locked by the rules: vLLM cannot serve it',
        ),
        (  # no hosted training, whose defaults train LoRA
            b"model = 'a/b'\nlearning_rate = 2e-6\nnum_generations = 8\nbeta = 0.1\n",
            {"trainer.optim.lr": 2e-6, "orchestrator.group_size": 8},
            "read as a config of TRL: 2 keys in train.toml",
        ),
        (  # the file's batch, and not the default's group
            b"model = 'a/b'\nbatch_size = 4\nmax_steps = 9\nlearning_rate = 1e-5\n[[env]]\nid = 'gsm8k'\n",
            {"orchestrator.batch_size": 4, "orchestrator.group_size": 4, "max_steps": 9, "trainer.optim.lr": 1e-5,
             LORA: {}, f"{LORA}.alpha": 16.0},
            "orchestrator.group_size = 4, added: orchestrator.batch_size = 4: groups of 8 do not divide a batch of 4",
        ),
    ],
)  # fmt: skip
def test_no_research_key_is_lost_and_no_value_of_the_file_becomes_a_default(
    source: bytes, values: dict[str, object], report: str
) -> None:
    imported = import_config(source, "x.toml")
    assert dict(parse(imported.train_toml("x.toml")).values) == values
    assert report in "\n".join(imported.report())


TRAINER = b"max_steps = 20\n[optim]\nlr = 1e-5  # mine\n[loss]\ntoken_mask_high = 8.0\nkl_tau = 0.1\n"
ORCHESTRATOR = b"max_steps = 20\nbatch_size = 32\nrollouts_per_example = 16\n[[env]]\nid = 'gsm8k'\n"


def test_several_files_are_one_config_as_prime_rl_reads_them() -> None:
    base = b"max_steps = 9\n# a rate\n[trainer.optim]\nlr = 1e-6\ntype = 'adamw'\n" + SOURCES
    overlay = b"seq_len = 512\n[trainer.optim]\nlr = 3e-6\n[[orchestrator.train.source]]\nname = 'b'\n"
    together = merged([("base.toml", base), ("overlay.toml", overlay)])
    tree = tomllib.loads(together.decode())
    assert tree == {
        "max_steps": 9, "seq_len": 512, "trainer": {"optim": {"lr": 3e-6, "type": "adamw"}},
        "orchestrator": {"group_size": 4, "train": {"source": [{"name": "b"}]}},
    }  # fmt: skip
    assert merged([("base.toml", base)]) == base
    with pytest.raises(ConfigError, match=r"overlay\.toml:1: .* is not TOML"):
        merged([("base.toml", base), ("overlay.toml", b"x = \n")])


def test_a_config_without_a_loss_is_told_that_its_default_has_changed() -> None:
    told = 'In prime-rl since 27 August 2026 the default is "ipo"'
    assert told in "\n".join(import_config(GROUPS, "x").report())
    for source in (GROUPS + b"[trainer.loss]\ntype = 'ipo'\n", AUTORESEARCH):  # that dialect has its own default
        assert told not in "\n".join(import_config(source, "x").report())


def test_every_problem_of_a_file_is_in_one_answer_with_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(AUTORESEARCH)
    heading, *lines = str(caught.value).split("\n")
    assert heading == "train.toml has 13 problems:"
    assert [int(line.split(":")[1]) for line in lines] == [1, 2, 5, 7, 10, 12, 14, 17, 20, 21, 24, 25, 27]
    assert "rollouts_per_example = 4 is now orchestrator.group_size. Write group_size = 4 under [orch" in lines[4]
    many = "".join(f"a{number} = 1\n" for number in range(300))
    with pytest.raises(ConfigError, match=r"^train\.toml has more than 50 problems:\n"):
        parse(many.encode())
    imported = import_config(f"{many}[trainer.optim]\nlr = 3e-6\n".encode(), "x")
    assert (imported.values["trainer.optim.lr"], len(imported.left_out)) == (3e-6, 300)


SOURCES = b"""\
[orchestrator]
group_size = 4
[[orchestrator.train.source]]
name = "first"
ratio = 3
env.taskset.id = "arithmetic"
[[orchestrator.train.source]]
name = "second"
env.taskset.id = "countdown"
algo = {type = "opd", teacher = {name = "a-teacher"}}
"""


def test_the_ratio_of_a_source_is_written_under_the_name_of_its_environment() -> None:
    imported = import_config(SOURCES, "rl.toml")
    assert parse(imported.train_toml("rl.toml")).values["orchestrator.train.ratio.arithmetic"] == 3.0
    assert "orchestrator.train.ratio.arithmetic = 3" in "\n".join(imported.report())


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (b'[model]\nname = "x"\n', "x has no key that"),
        (
            b"[eval.client]\nbase_url = 'u'\n[sampling]\ntemperature = 0.7\n",
            "x has eval.client.base_url: it is a config of sft, evaluation",
        ),
        (b"\xff", "Name a config file"),
    ],
)
def test_a_file_without_a_key_of_train_toml_is_refused(source: bytes, cause: str) -> None:
    with pytest.raises(UsageError, match=re.escape(cause)):
        import_config(source, "x")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('wandb.api_key = "SECRET"', "wandb.api_key"),
        ('env = [{args = {HF_TOKEN = "SECRET"}}]', "env.args.HF_TOKEN"),
        ('"b\\n.password" = "SECRET"', "b\\\\n.password"),
    ],
)
def test_a_config_with_a_secret_is_refused_by_the_name_of_its_key(line: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"^x: {name} would be printed") as caught:
        import_config(f"{line}\n{GROUPS.decode()}".encode(), "x")
    assert "SECRET" not in str(caught.value)
    harmless = b'tokenizer.name = "NAME"\nmax_tokens = "4"\npad_token = "<pad>"\nuse_token = true\napi_key = ""\n'
    assert import_config(harmless + GROUPS, "x").values["orchestrator.group_size"] == 8


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("train.toml", "rules.toml", "run.py"):
        shutil.copy(ROOT / name, root)
    for name in ("environments", "models"):
        (root / name).symlink_to(ROOT / name)
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "add", "train.toml", "rules.toml", "run.py")
    git(root, "commit", "--quiet", "-m", "Begin")
    monkeypatch.chdir(root)
    return root


def answer(*words: str) -> str:
    return " ".join(CliRunner().invoke(commands, ["import", *words]).output.split())


def test_import_writes_and_commits_what_it_carries_over(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.toml").write_bytes(AUTORESEARCH)
    output = answer(str(tmp_path / "theirs.toml"))
    assert 'rules.toml: environments = ["gsm8k"]' in output
    assert 'rules.toml: model = "Qwen/Qwen2.5-0.5B-Instruct"' in output
    assert load(checkout / "train.toml").get("orchestrator.batch_size") == 256
    rules = rules_here(checkout, None, 0)
    assert (rules.environment_names, rules.model) == (("gsm8k",), "Qwen/Qwen2.5-0.5B-Instruct")
    assert (checkout / "imported.toml").read_bytes() == AUTORESEARCH
    assert git(checkout, "log", "-1", "--format=%s", "--stat").split()[:2] == ["Import", "theirs.toml"]
    assert git(checkout, "status", "--porcelain", "--untracked-files=no") == ""
    head = git(checkout, "rev-parse", "HEAD")
    assert "wrote nothing, as this config was imported before" in answer(str(tmp_path / "theirs.toml"))
    assert git(checkout, "rev-parse", "HEAD") == head


def test_import_merges_the_files_that_it_is_given(checkout: Path, tmp_path: Path) -> None:
    for name, source in (("trainer.toml", TRAINER), ("orchestrator.toml", ORCHESTRATOR)):
        (tmp_path / name).write_bytes(source)
    output = answer(str(tmp_path / "trainer.toml"), str(tmp_path / "orchestrator.toml"))
    assert 'rules.toml: environments = ["gsm8k"]' in output
    assert load(checkout / "train.toml").values == {
        "max_steps": 20, "trainer.optim.lr": 1e-5, "orchestrator.batch_size": 32, "orchestrator.group_size": 16,
        "trainer.loss.kl_tau": 0.0,
    }  # fmt: skip
    assert git(checkout, "log", "-1", "--format=%s").strip() == "Import trainer.toml + orchestrator.toml"


def test_import_leaves_rules_alone_where_the_checkout_has_not_what_they_name(checkout: Path, tmp_path: Path) -> None:
    entries = "".join(f'[[env]]\nid = "{name}"\n' for name in ("a\\n\\u001b[31mb", "..", "x" * 900))
    (tmp_path / "theirs.toml").write_text(HOSTED.decode() + entries)
    before = (checkout / "rules.toml").read_bytes()
    output = answer(str(tmp_path / "theirs.toml"))
    assert "rules.toml: not copied: environments: Expected `str` matching regex" in output
    assert "\x1b" not in output
    assert 'model = "an-owner/a-model": write the model and its commit on the hub' in output
    assert (checkout / "rules.toml").read_bytes() == before


def test_import_sets_keys_at_the_top_of_rules_toml_only(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.toml").write_bytes(AUTORESEARCH)
    mine = "\n[environment.math]\nargs = {levels = [1]}\n"
    theirs = 'model = "Qwen/Qwen2.5-0.5B-Instruct"\nrevision = "7ae557604adf67be50417f59c2c2f167def9a775"\n'
    gsm8k = 'environments = ["gsm8k"]\n'
    old = 'environments = [\n    "countdown",  # model = "x"\n]\nmodel = ""\n'
    (checkout / "rules.toml").write_text(f"# [a comment\n{old}{mine}")
    git(checkout, "commit", "--quiet", "-am", "Choose")
    answer(str(tmp_path / "theirs.toml"))
    assert (checkout / "rules.toml").read_text() == f"# [a comment\n{gsm8k}{theirs}{mine}"


def test_import_refuses_to_overwrite_an_edit_and_to_change_a_campaign(checkout: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.toml"
    theirs.write_bytes(TODAY)
    assert "File 'nowhere.toml' does not exist" in answer("nowhere.toml")
    answer(str(theirs))
    theirs.write_bytes(AUTORESEARCH)
    for name in ("train.toml", "rules.toml", "imported.toml"):
        (checkout / name).write_text("# mine\n")
        assert f"{name} has changes that are not committed" in answer(str(theirs))
        assert (checkout / name).read_text() == "# mine\n"
        git(checkout, "checkout", "--quiet", name)
    git(checkout, "branch", "--move", "mine")
    git(checkout, "switch", "--quiet", "--create", "my-campaign")
    campaign(Ledger(checkout), [], branch="my-campaign")
    assert "my-campaign is a campaign. Import on your own branch: git switch BRANCH" in answer(str(theirs))
    assert (checkout / "imported.toml").read_bytes() == TODAY


def test_an_empty_config_is_one_line() -> None:
    for source in (b"", b"# nothing\n"):
        with pytest.raises(ConfigError, match=r"x\.toml has no key that is allowed in train\.toml"):
            import_config(source, "x.toml")

"""The rules hash moves with everything that can move a number, and with nothing else."""

import json
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from nightshift.config.rules_toml import Chosen, rules_elsewhere, rules_here, rules_of
from nightshift.errors import UsageError
from tests.rules import ALL_RULES, ARITHMETIC_TRL, GSM8K_PRIME_RL, ROOT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("environments", "models", "nightshift"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "rules.toml", tmp_path)
    shutil.copy(ROOT / "run.py", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "environments/arithmetic/nightshift_arithmetic/data.py",
        "nightshift/evaluation/environment.py",
        "nightshift/engines/trl/grpo.py",
        "nightshift/config/allowlist.py",
        "models/arithmetic-base/model.safetensors",
    ],
)
def test_one_byte_of_what_measures_changes_the_hash(root: Path, name: str) -> None:
    before = ARITHMETIC_TRL.hash(root)
    with (root / name).open("ab") as file:
        file.write(b"\n")
    assert ARITHMETIC_TRL.hash(root) != before


def test_what_does_not_measure_does_not_change_the_hash(root: Path) -> None:
    before = ARITHMETIC_TRL.hash(root)
    free = ("environments/other/new.py", "environments/gsm8k/__pycache__/x.pyc", "environments/gsm8k/.venv/lib/x.py")
    editors = ("grpo.py~", ".grpo.py.swp", ".grpo.py.swx", ".#grpo.py", "#grpo.py#", "4913", ".DS_Store")
    editors += (".idea/x.xml", ".vscode/settings.json", ".ipynb_checkpoints/grpo.py", ".nfs00000000018bc3ae0000001a")
    for name in (*free, *(f"nightshift/engines/trl/{name}" for name in editors), "docs/x.md", "tests/x.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    for name in ("nightshift/cli/output.py", "nightshift/engines/prime_rl/engine.py", "run.py"):
        (root / name).write_text("")
    assert ARITHMETIC_TRL.hash(root) == before == ARITHMETIC_TRL.hash(ROOT)  # wherever the checkout lies


def test_another_environment_touches_its_folder_and_rules_toml_only(root: Path) -> None:
    """gsm8k's rules and their hash stay as they were."""
    mine = root / "environments" / "mine"
    before = rules_here(root, "prime-rl", 2)
    shutil.copytree(root / "environments" / "arithmetic", mine)
    (mine / "nightshift_arithmetic").rename(mine / "nightshift_mine")
    with (root / "rules.toml").open("a") as file:
        file.write("[environment.mine]\nweight = 2.0\n")
    after = rules_here(root, "prime-rl", 2)
    assert after == before
    assert after.hash(root) == GSM8K_PRIME_RL.hash(ROOT)
    text = (root / "rules.toml").read_text()
    (root / "rules.toml").write_text(text.replace("environments = []", 'environments = ["gsm8k", "mine"]'))
    assert rules_here(root, "prime-rl", 2).name == "gsm8k+mine-prime-rl"


@pytest.mark.parametrize("name", [".models/tiny", "data/.hidden"])
def test_no_name_hides_what_measures(root: Path, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A model, or data of an environment, in a folder whose name begins with a dot; a document that it may read."""
    outside = tmp_path_factory.mktemp("outside")
    for place in (root, outside):
        shutil.copytree(root / "models/arithmetic-base", place / name)
    for model in (name, str(outside / name)):
        rules = rules_of(root, Chosen(environments=["arithmetic"], model=model), "trl", 0)
        for path in (root / model, root / "environments/gsm8k/.data"):
            for file in ("model.safetensors", "prompt.md"):
                before = rules.hash(root)
                path.mkdir(exist_ok=True)
                with (path / file).open("ab") as written:
                    written.write(b"\n")
                assert rules.hash(root) != before, path / file


def test_a_package_that_is_a_link_is_refused(root: Path) -> None:
    package = root / "environments/gsm8k/nightshift_gsm8k"
    package.rename(root / "elsewhere")
    package.symlink_to(root / "elsewhere")
    with pytest.raises(
        UsageError, match=r"nightshift_gsm8k is a link to a folder, which the rules hash does not cover"
    ):
        ARITHMETIC_TRL.hash(root)


def test_constants_of_the_decision_are_such_that_a_record_can_be_read(root: Path) -> None:
    with (root / "environments/gsm8k/pyproject.toml").open("a") as file:
        file.write("\n[tool.nightshift.decision]\nseed_sd = 0\n")
    with pytest.raises(UsageError, match=r"\$\.decision\.seed_sd"):
        rules_of(root, Chosen(environments=["gsm8k"]), "trl", 1)


def test_what_an_environment_requires_is_hashed_and_only_what_it_pins_is_asked_of_prime_rl(root: Path) -> None:
    path, found = root / "environments" / "countdown" / "pyproject.toml", []
    text = path.read_text()
    assert 'dependencies = ["nightshift-gsm8k"]' in text
    pinned = f"msgspec=={metadata.version('msgspec')}"
    for requires in ([], ["msgspec"], ["numpy>=1"], [pinned, "numpy"]):
        path.write_text(text.replace('["nightshift-gsm8k"]', json.dumps(requires)))
        (environment,) = rules_of(root, Chosen(environments=["countdown"]), "trl", 0).environments
        found.append((environment.versions, environment.versions_sha256))
    assert [versions for versions, _ in found] == [(), (), (), (pinned,)]
    assert len({digest for _, digest in found}) == 4
    assert found[0][1] == ""


def test_elsewhere_only_the_model_of_here_keeps_its_revision_and_scale(root: Path) -> None:
    mine = f'environments = ["gsm8k"]\nmodel = "their/model"\nrevision = "{"0" * 40}"\nlearning_rate_scale = 3.0\n'
    (root / "rules.toml").write_text(mine)
    here = rules_here(root, "trl", 1)
    same = rules_elsewhere(root, here, ["arithmetic"], 1)
    assert (same.model, same.model_revision, same.learning_rate_scale) == ("their/model", "0" * 40, 3.0)
    game = rules_elsewhere(root, replace(here, model="models/arithmetic-base"), ["tictactoe"], 1)
    assert (game.model, game.model_revision, game.learning_rate_scale) == ("models/tictactoe-base", None, 20.0)


def test_another_budget_is_another_set_of_rules() -> None:
    assert ARITHMETIC_TRL.with_budget(10).hash(ROOT) != ARITHMETIC_TRL.hash(ROOT)
    assert ARITHMETIC_TRL.with_budget(60).hash(ROOT) == ARITHMETIC_TRL.hash(ROOT)
    assert len({rules.hash(ROOT) for rules in ALL_RULES}) == len(ALL_RULES)


@pytest.mark.parametrize(
    ("engine", "num_gpus", "names", "model", "expected"),
    [
        (None, 0, [], "", "arithmetic-trl models/arithmetic-base"),
        (None, 1, [], "", "gsm8k-trl Qwen/Qwen2.5-0.5B-Instruct"),
        (None, 2, [], "", "gsm8k-prime-rl Qwen/Qwen2.5-0.5B-Instruct"),
        ("prime-rl", 0, [], "", "gsm8k-prime-rl Qwen/Qwen2.5-0.5B-Instruct"),  # whose check says what is missing
        ("prime-rl", 2, ["arithmetic"], "", "arithmetic-prime-rl Qwen/Qwen2.5-0.5B-Instruct"),
        ("prime-rl", 0, ["gsm8k", "arithmetic"], "", "gsm8k+arithmetic-prime-rl Qwen/Qwen2.5-0.5B-Instruct"),
    ],
)
def test_machine_engine_and_rules_toml_pick_the_rules(engine, num_gpus, names, model, expected):
    rules = rules_of(ROOT, Chosen(environments=names, model=model), engine, num_gpus)
    assert f"{rules.name} {rules.model}" == expected


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 8])
def test_more_gpus_than_a_pair_are_prime_rl_s_whatever_is_here(num_gpus: int) -> None:
    chosen = Chosen(environments=["gsm8k"], infer_gpus=2, train_gpus=6, tensor_parallel=2)
    rules = rules_of(ROOT, chosen, None, num_gpus)
    assert (rules.name, rules.num_gpus, rules.gpu_split, rules.tensor_parallel) == ("gsm8k-prime-rl", 8, (2, 6), 2)
    assert rules.hash(ROOT) != rules_of(ROOT, Chosen(environments=["gsm8k"], train_gpus=7), None, 8).hash(ROOT)
    with pytest.raises(UsageError, match=r"infer_gpus = 2, train_gpus = 6: --engine trl uses one GPU\. Write 1 for"):
        rules_of(ROOT, chosen, "trl", num_gpus)


def test_several_environments_share_the_score_by_their_weights() -> None:
    tables = {"gsm8k": {"weight": 3.0}}
    chosen = msgspec.convert({"environments": ["gsm8k", "arithmetic"], "environment": tables}, Chosen)
    rules = rules_of(ROOT, chosen, "trl", 1)
    environments = [(e.name, e.num_validation, e.weight) for e in rules.environments]
    assert environments == [("gsm8k", 1319, 3.0), ("arithmetic", 4000, 1.0)]
    assert rules.decision.seed_sd == pytest.approx(0.75 * 0.0125 + 0.25 * 0.013)
    scale = (0.75 * 0.008 + 0.25 * 0.08) / 0.008
    assert rules.decision.least_worth == pytest.approx(scale * 0.0005)
    assert rules.decision.kinds[0][1] == pytest.approx(scale * 0.007)
    equal = rules_of(ROOT, Chosen(environments=["gsm8k", "arithmetic"]), "trl", 1)
    assert rules.hash(ROOT) != equal.hash(ROOT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("environments = [", "rules.toml: "),
        ('environments = ["gms8k"]', 'rules.toml: environments/ has no "gms8k". Write one of: arith'),
        ('environments = ["../x"]', "Expected `str` matching regex"),
        ('environments = ["eval"]', "Expected `str` matching regex"),  # the decided score's column is called so
        ("[environment.gsm8k]\nweight = 0", "Expected `float` >= 1e-09"),
        ("infer_gpus = 3\ntensor_parallel = 2", "tensor_parallel = 2 does not divide infer_gpus = 3"),
        (f'revision = "{"0" * 40}"', "rules.toml: revision needs model"),
        ('model = "models/.."', "is a folder that contains this checkout"),
        ('revision = "main"', "Expected `str` matching regex"),
        (
            'environments = ["gsm8k"]\nmodel = "./environments/../models/arithmetic-base"',
            "models/arithmetic-base cannot answer gsm8k",
        ),
        (None, "rules.toml cannot be read: No such file or directory. Restore it: git checkout rules.toml"),
    ],
)
def test_rules_toml_is_read_strictly(tmp_path: Path, text: str | None, expected: str) -> None:
    for name in ("environments", "models"):
        shutil.copytree(ROOT / name, tmp_path / name)
    if text is not None:
        (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(UsageError) as raised:
        rules_here(tmp_path, "prime-rl", 2)
    assert expected in str(raised.value)

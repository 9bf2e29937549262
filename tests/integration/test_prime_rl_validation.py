"""The plan of a run against prime-rl's real config classes, and its env block against the real verifiers.

The former need an installation: they run where NIGHTSHIFT_PRIME_RL names a folder whose `.venv/bin/python`
can import prime_rl.configs (prime-rl's whole environment, or its slim configs package), and are skipped
elsewhere. What they find is recorded in tests/fixtures/prime_rl (refusals.json, launcher.json) for the tests
that need no installation; with NIGHTSHIFT_WRITE_GOLDEN=1 this file writes those again.
"""

import copy
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nightshift.config.allowlist import KEYS, find_key
from nightshift.config.import_config import import_config
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import Chosen, chosen_in, rules_of
from nightshift.config.train_toml import Config, parse, set_values
from nightshift.engines.prime_rl.config import AC, AC_OFFLOADING
from nightshift.engines.prime_rl.launch import VALIDATOR, Launch
from nightshift.errors import ConfigError
from nightshift.executors.gpus import SIZES_GB
from nightshift.report.export.rl_toml import rl_toml
from tests.prime_rl_plans import SHIPPED, VARIANTS, launch_of, leaves, open_configs, variant
from tests.rules import GSM8K_PRIME_RL, ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "prime_rl"
INSTALLATION = Path(os.environ.get("NIGHTSHIFT_PRIME_RL", "/nowhere"))
PYTHON = INSTALLATION / ".venv" / "bin" / "python"
needs_prime_rl = pytest.mark.skipif(
    not PYTHON.exists(), reason="NIGHTSHIFT_PRIME_RL names no installation with prime-rl's config classes"
)
BOTH = rules_of(Path(__file__).parents[2], Chosen(environments=["gsm8k", "arithmetic"]), "prime-rl", 2)
LOSS = b"""
environments = ["gsm8k"]
[loss.clipped]
package = "losses/clipped"
import_path = "clipped_loss.clipped"
parameters = { clip = { default = 0.2, low = 0.01, high = 1.0 } }
"""
OWN_LOSS = rules_of(ROOT, chosen_in(ROOT, LOSS), "prime-rl", 2)
GAME = rules_of(ROOT, Chosen(environments=["gsm8k", "tictactoe"], model="Qwen/Qwen2.5-0.5B-Instruct"), "prime-rl", 2)
# Of prime-rl's examples/basic/reverse-text/rl.toml.
REVERSE_TEXT = b"""
max_steps = 20
seq_len = 2048
model.name = "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"
orchestrator = {batch_size = 128, group_size = 16, train.sampling.max_completion_tokens = 128}
trainer.optim.lr = 3e-6
ckpt = {}
"""
OPPONENT = b"\n[orchestrator.train.opponent]\n"
DRIVER = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("validator", sys.argv[1])
validator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(validator)
for folder in map(pathlib.Path, sys.argv[2:]):
    validator.main(folder / "rl.json", folder / "configs", folder / "validator.json")
"""


# prime-rl's own launcher, with a Popen that only takes down what it is asked to start.
RECORDER = """
import importlib.util, json, os, sys, types
if importlib.util.find_spec("prime_rl.entrypoints") is None:
    sys.exit(3)
utils = types.ModuleType("prime_rl.utils.utils")
utils.get_free_port = lambda: 20005
sys.modules[utils.__name__] = utils
from prime_rl.configs.rl import RLConfig
from prime_rl.entrypoints import rl
before, started = dict(os.environ), []
class Popen:
    pid, returncode, stderr = 0, 0, None
    def __init__(self, argv, env=None, **options):
        if not options.get("shell"):
            started.append([argv, {name: value for name, value in env.items() if before.get(name) != value}])
    def wait(self, timeout=None):
        return 0
    poll = wait
rl.Popen = Popen
rl.rl_local(RLConfig.model_validate(json.load(open("rl.json"))))
json.dump(started, open("launcher.json", "w"))
"""


def recording(name: str, found: Any) -> Any:
    """What a fixture holds; `found`, where it is to be written again."""
    path = FIXTURES / name
    if os.environ.get("NIGHTSHIFT_WRITE_GOLDEN"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    return json.loads(path.read_bytes())


def written(source: Config, run_dir: Path, **changes: Any) -> Launch:
    launch = launch_of(source, run_dir, **changes)
    run_dir.mkdir()
    launch.write()
    return launch


def environment(home: Path) -> dict[str, str]:
    packages = os.pathsep.join(str(folder) for folder in sorted((ROOT / "environments").iterdir()))
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": packages, "HF_HUB_OFFLINE": "1"}


def verdicts(folders: list[Path]) -> list[dict[str, Any]]:
    """What the real classes say of each planned run."""
    argv = [PYTHON, "-P", "-c", DRIVER, VALIDATOR, *folders]
    home = folders[0].parent
    subprocess.run(argv, env=environment(home), cwd=home, check=True)
    return [json.loads((folder / "validator.json").read_bytes()) for folder in folders]


def test_an_earlier_policy_as_opponent_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'type = "previous": the server of prime-rl has only the current policy'):
        launch_of(parse(SHIPPED + OPPONENT + b'type = "previous"\ninterval = 5'), tmp_path, rules=GAME)
    with pytest.raises(ConfigError, match=r"interval = 5 has no effect with .*type = \"self\""):
        parse(SHIPPED + OPPONENT + b"interval = 5")


SPLITS = ((1, 3, 1), (2, 6, 1), (2, 6, 2), (4, 4, 2))  # infer_gpus, train_gpus, tensor_parallel


def split_rules(infer: int, train: int, parallel: int) -> Rules:
    chosen = Chosen(environments=["gsm8k"], infer_gpus=infer, train_gpus=train, tensor_parallel=parallel)
    return rules_of(ROOT, chosen, None, infer + train)


# prime-rl's own command line reads the file of `export --to rl.toml`; its class reads the plan of the same run.
EXPORTS = """
import json, pathlib, sys
from prime_rl.configs.rl import RLConfig
from prime_rl.utils.config import cli
for folder in map(pathlib.Path, sys.argv[1:]):
    plan = RLConfig.model_validate(json.loads((folder / "rl.json").read_bytes()))
    export = cli(RLConfig, args=["@", str(folder / "rl.toml")])
    resolved = [config.model_dump(mode="json") for config in (plan, export)]
    (folder / "resolved.json").write_text(json.dumps(resolved))
"""


@needs_prime_rl
def test_every_plan_is_valid_in_prime_rl_and_its_export_resolves_to_what_the_engine_runs(tmp_path: Path) -> None:
    mixed = [parse(SHIPPED + b"\n[orchestrator.train.ratio]\ngsm8k = " + share) for share in (b"1e-6", b"2.0", b"1e6")]
    others = (b'type = "pool"', b'type = "self"\ntemperature = 0.01', b'type = "self"\ntemperature = 2')
    scaled = replace(GSM8K_PRIME_RL, learning_rate_scale=20.0)
    imported = parse(import_config(REVERSE_TEXT, "rl.toml").train_toml("rl.toml"))
    runs = [({}, variant(name)) for name in VARIANTS] + [({}, config) for config in open_configs().values()]
    runs += [({"rules": BOTH}, each) for each in mixed]
    runs += [({"rules": split_rules(*split)}, variant("train")) for split in SPLITS]
    runs += [({"rules": GAME}, parse(SHIPPED + OPPONENT + other)) for other in others]
    own = b"orchestrator.group_size = 4\ntrainer.loss.type = 'clipped'\n"
    runs += [({"rules": OWN_LOSS}, parse(own + more)) for more in (b"", b"trainer.loss.kwargs.clip = 0.01\n")]
    runs += [({"rules": GAME}, variant("train")), ({"rules": scaled}, variant("train")), ({}, imported)]
    tried = {find_key(path) for _, config in runs for path in config.values}
    assert [key.path for key in KEYS if "prime-rl" in key.engines and key not in tried] == []
    for memory in (f"{num_cards} x {size} GB" for num_cards in (1, 2) for size in SIZES_GB):
        kept = {AC: None, AC_OFFLOADING: None}
        adapter = {"trainer.model.lora": {}, AC: {}, "trainer.model.ac.freq": 2}
        for changes in ({}, kept, adapter, {AC_OFFLOADING: {}}, {"trainer.model.fsdp_cpu_offload": True}):
            runs.append(({"memory": memory}, parse(set_values(SHIPPED, changes))))
    assert len(runs) > 100
    launches = [written(config, tmp_path / str(number), **more) for number, (more, config) in enumerate(runs)]
    for launch in launches:
        (launch.run_dir / "rl.toml").write_bytes(rl_toml(launch.settings, launch.seed, ["a comment"]))
    folders = [launch.run_dir for launch in launches]
    subprocess.run([PYTHON, "-P", "-c", EXPORTS, *folders], env=environment(tmp_path), cwd=tmp_path, check=True)
    places = ("output_dir", "run", "rollout_transport", "inference.server", "env_server_base_port", "client.base_url")
    for launch, folder in zip(launches, folders, strict=True):
        plan, export = (dict(leaves(config)) for config in json.loads((folder / "resolved.json").read_bytes()))
        assert [path for path, value in leaves(launch.tree) if value not in ({}, plan.get(path))] == [], folder
        differing = {path for path in plan.keys() | export.keys() if plan.get(path) != export.get(path)}
        differing = {path for path in differing if not any(part in path for part in (*places, "monitors.file.path"))}
        assert differing == set(), folder


# Each goes past our own checks, as a gap in them would: a key, of the first source, and its value.
BAD: dict[str, tuple[str, Any]] = {
    "unknown key": ("trainer.optim.lrr", 1.0),
    "text for a number": ("trainer.optim.lr", "abc"),
    "out of range": ("orchestrator.train.sampling.temperature", 3.0),
    "unknown variant": ("trainer.loss.type", "ppo"),
    "two settings for one": ("trainer.model.seq_len", 1024),
    "the test split": ("orchestrator.train.source.env.taskset.split", "test"),
    "a taskset that is not installed": ("orchestrator.train.source.env.taskset.id", "nowhere"),
}


@needs_prime_rl
def test_bad_trees_are_refused_as_recorded_and_nothing_is_written(tmp_path: Path) -> None:
    folders = {}
    for number, (name, (path, value)) in enumerate(BAD.items()):
        launch = written(parse(SHIPPED), tmp_path / str(number))
        tree = node = copy.deepcopy(dict(launch.tree))
        *tables, leaf = path.split(".")
        for table in tables:
            node = node["source"][0] if table == "source" else node.setdefault(table, {})
        node[leaf] = value
        (launch.run_dir / "rl.json").write_text(json.dumps(tree))
        folders[name] = launch.run_dir
    found = dict(zip(folders, verdicts(list(folders.values())), strict=True))
    assert [name for name, answer in found.items() if not answer["errors"]] == []
    assert [path for folder in folders.values() for path in (folder / "configs").iterdir()] == []
    assert found == recording("refusals.json", found)


@needs_prime_rl
@pytest.mark.parametrize("split", [(1, 1, 1), (2, 6, 1)])
def test_prime_rl_s_launcher_writes_the_same_files_and_starts_the_recorded_processes(
    tmp_path: Path, split: tuple[int, int, int]
) -> None:
    gpu_ids = tuple(range(split[0] + split[1]))
    launch = written(parse(SHIPPED), tmp_path / "run", rules=split_rules(*split), gpu_ids=gpu_ids)
    assert verdicts([launch.run_dir]) == [{"errors": []}]
    visible = ",".join(map(str, gpu_ids))
    variables = {**environment(tmp_path), "CUDA_VISIBLE_DEVICES": visible, "PRL_RUN_ID": "an id"}
    argv = [PYTHON, "-P", "-c", RECORDER]
    result = subprocess.run(argv, env=variables, cwd=launch.run_dir, capture_output=True, text=True)
    if result.returncode == 3:
        pytest.skip("only prime-rl's configs package is installed, not its launcher")
    assert result.returncode == 0, result.stderr
    for name in ("inference.json", "trainer.json", "orchestrator.json", "envs/train/gsm8k.json"):
        ours, theirs = launch.run_dir / "configs" / name, launch.prime_dir / "configs" / name
        assert ours.read_bytes() == theirs.read_bytes()
    started = json.loads((launch.run_dir / "launcher.json").read_bytes())
    for command, (argv, added) in zip([*launch.commands.values()][1:], started, strict=True):
        assert command.env.get("CUDA_VISIBLE_DEVICES") == added.get("CUDA_VISIBLE_DEVICES"), argv
        assert [word for word in command.argv if "nproc" in word] == [word for word in argv if "nproc" in word]
    if split != (1, 1, 1):
        return
    text = (launch.run_dir / "launcher.json").read_text().replace(str(launch.prime_dir), "<run>")
    text = re.sub(r"(--rdzv-id=)[0-9a-f]+", r"\1<id>", text)
    assert json.loads(text) == recording("launcher.json", json.loads(text))

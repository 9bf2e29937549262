"""What a prime-rl run would start: golden plans, prime-rl's recorded schema, and that two runs share nothing.

The golden files in tests/fixtures/prime_rl/golden are written only by `NIGHTSHIFT_WRITE_GOLDEN=1 pytest
tests/unit/test_prime_rl_launch.py`; read their difference before it is committed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from nightshift import config, keys
from nightshift.engines.prime_rl_effective import PROMPT_TOKENS, effective, fixed
from nightshift.engines.prime_rl_launch import VALIDATOR, Launch, describe, free_ports, leaves
from nightshift.errors import ConfigError
from nightshift.rules import GSM8K_PRIME_RL as RULES
from tests.prime_rl_plans import ENVIRONMENT, PORTS, SHIPPED, VARIANTS, launch_of, open_configs, variant

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED: dict[str, dict[str, Any]] = json.loads((FIXTURES / "rlconfig-keys.json").read_text())
RUN_DIR = Path("/home/user/nightshift/runs/0007/run-1")
# The recording lost the variants of these two, which are those of both sides.
SAME_AS = {
    "weight_broadcast": "trainer.weight_broadcast",
    "inference.weight_broadcast": "trainer.weight_broadcast",
    "rollout_transport": "trainer.rollout_transport",
}
# prime-rl narrows these by the ids in them, so its schema does not hold them: test_prime_rl_validation.py has
# the real classes read them.
_ENV = "orchestrator.train.source[].env"
NARROWED = (f"{_ENV}.agent.", *(f"{_ENV}.taskset.{name}" for name in ("split", "size", "seed")))
MAPPINGS = ("curriculum.sampler<difficulty_pool>.pools.", "curriculum.gates.")
PASSED_THROUGH = {f"inference.vllm.{name}" for name in ("generation_config", "max_num_seqs", "max_num_batched_tokens")}
TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def golden(launch: Launch) -> dict[str, Any]:
    """A plan as JSON; the validator's place in this checkout is the only part that is not the same everywhere."""
    commands = [
        {
            "name": command.name,
            "argv": [word.replace(str(VALIDATOR), "<validator>") for word in command.argv],
            "env": dict(command.env),
            "log_name": command.log_name,
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


# --- the config tree ---------------------------------------------------------------------------------


def recorded_leaves(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree under the name that the recording has for it."""
    if isinstance(node, list) and node and isinstance(node[0], dict):
        for item in node:
            yield from recorded_leaves(item, f"{name}[]")
    elif isinstance(node, dict) and node:
        known = SAME_AS.get(name, name)
        variants = RECORDED.get(known, {}).get("variants")
        if variants:
            assert node["type"] in variants
            known += f"<{node['type']}>"
        for key, value in node.items():
            if not (variants and key == "type"):
                yield from recorded_leaves(value, f"{known}.{key}" if known else key)
    else:
        yield name, node


def disagreement(name: str, value: Any) -> str | None:
    """How one value of a tree contradicts the recording; None if it does not."""
    if name in PASSED_THROUGH or name.startswith(NARROWED) or any(mapping in name for mapping in MAPPINGS):
        return None
    if name == "orchestrator.renderer.name":
        return None if value in RECORDED["orchestrator.renderer"]["renderers"] else "no such renderer"
    if name not in RECORDED:
        return "no such key"
    entry = RECORDED[name]
    if value is None:
        return None if entry.get("nullable") else "cannot be null"
    if value == {} and any(other.startswith((f"{name}.", f"{name}<")) for other in RECORDED):
        return None  # a table that is on
    for shape in entry.get("types", [entry]):
        if not isinstance(value, TYPES[shape["type"]]) or (isinstance(value, bool) and shape["type"] != "boolean"):
            continue
        inside = (
            value in shape.get("enum", [value])
            and value == shape.get("const", value)
            and (isinstance(value, str | list) or shape.get("minimum", value) <= value <= shape.get("maximum", value))
            and ("exclusiveMinimum" not in shape or value > shape["exclusiveMinimum"])
        )
        if inside:
            return None
    return f"{value!r} is none of {entry}"


def disagreements(tree: Any, name: str = "") -> dict[str, str]:
    found = {path: disagreement(path, value) for path, value in recorded_leaves(tree, name)}
    return {path: problem for path, problem in found.items() if problem}


def test_every_value_of_every_plan_is_a_key_of_prime_rl_with_a_value_that_it_takes() -> None:
    for name, each in {**{name: variant(name) for name in VARIANTS}, **open_configs()}.items():
        launch = launch_of(each, RUN_DIR)
        assert disagreements(launch.tree) == {}, name
        assert disagreements(launch.inference_json, "inference") == {}, name


def test_the_schema_check_finds_what_is_wrong() -> None:
    tree = json.loads(json.dumps(dict(launch_of(variant("train"), RUN_DIR).tree)))
    tree["trainer"]["optim"]["lrr"] = 1.0
    tree["trainer"]["model"]["attn"] = "sdpa"
    tree["inference"]["server"]["port"] = "8000"
    tree["orchestrator"]["batch_size"] = 0
    tree["orchestrator"]["renderer"]["name"] = "qwen2"
    tree["clean"] = None
    assert list(disagreements(tree)) == [
        "orchestrator.batch_size",
        "orchestrator.renderer.name",
        "trainer.optim<adamw>.lrr",
        "trainer.model.attn",
        "inference.server.port",
        "clean",
    ]


def test_what_the_agent_writes_arrives_as_it_stands() -> None:
    for name, each in {"train": variant("train"), **open_configs()}.items():
        tree = launch_of(each, RUN_DIR).tree
        for path, value in each.values.items():
            if path.endswith("curriculum.sampler.type") and value == "standard":
                continue  # is what a source without a curriculum does
            node: Any = tree
            for segment in path.replace(f"{keys.SOURCE}.", f"{keys.SOURCE}.[0].").split("."):
                node = node[0] if segment == "[0]" else node[segment]
            wanted = list(value) if isinstance(value, tuple) else value
            assert node == wanted or (wanted == {} and isinstance(node, dict)), f"{name}: {path}"


def test_nothing_that_the_engine_fixes_can_be_written_in_train_toml() -> None:
    paths = [path for path, _ in leaves(fixed(RULES))]
    assert len(paths) > 20
    for path in (re.sub(r"\[\d+\]", "", path) for path in paths):
        assert keys.lock(tuple(path.split("."))) is not None, path
        for value in ("1", '"x"', "[[]]", "{ x = 1 }"):
            with pytest.raises(ConfigError):
                config.parse(f"{path} = {value}\n".encode())


def test_settings_are_json_and_do_not_depend_on_the_run() -> None:
    settings = effective(variant("train"), RULES)
    assert json.loads(json.dumps(settings)) == settings == effective(variant("train"), RULES)
    assert "/" not in "".join(str(value) for path, value in leaves(settings) if path != "model.name")
    before = json.dumps(settings)
    launch_of(variant("train"), RUN_DIR)
    assert json.dumps(settings) == before


def test_a_default_that_is_written_out_changes_nothing() -> None:
    base = b"max_steps = 1000\n[orchestrator]\ngroup_size = 2\n"
    for key in keys.KEYS:
        if key.default is None or keys.ANY in key.path or key.path == "orchestrator.group_size":
            continue
        needed = {key.only_if[0]: key.only_if[1][0]} if key.only_if and key.only_if[1] != (None,) else {}
        with suppress(ConfigError):  # needs another key beside it
            without, with_it = (
                config.parse(config.set_values(base, needed | more)) for more in ({}, {key.path: key.default})
            )
            if key.path not in without.resolved:
                continue  # it switches a table on
            assert without.hash == with_it.hash
            assert effective(without, RULES) == effective(with_it, RULES), key.path


def test_the_server_s_context_holds_the_longest_rollout_and_the_longest_answer() -> None:
    [length] = [value for path, value in leaves(effective(variant("train"), RULES)) if path.endswith("max_model_len")]
    assert length - PROMPT_TOKENS >= max(RULES.max_completion_tokens, RULES.decoding.max_completion_tokens)


def test_a_rollout_longer_than_the_server_s_context_is_refused_with_its_line() -> None:
    source = SHIPPED.replace(b"max_completion_tokens = 1024", b"max_completion_tokens = 2049")
    source = source.replace(b"seq_len = 2048 ", b"seq_len = 4096 ")
    line = source.decode().split("\n").index(next(line for line in source.decode().split("\n") if "= 2049" in line)) + 1
    with pytest.raises(ConfigError, match=f"train.toml:{line}: .*= 2049: .*up to 2048 tokens.*Write .* = 2048 or less"):
        effective(config.parse(source), RULES)


@pytest.mark.parametrize(("seeds", "changed"), [((1, 1), 0), ((1, 2), 2)])
def test_only_seeds_tell_runs_of_one_config_apart(seeds: tuple[int, int], changed: int) -> None:
    one, other = (dict(leaves(launch_of(variant("train"), RUN_DIR, seed=seed).tree)) for seed in seeds)
    names = [name for name in one if one[name] != other[name]]
    assert len(names) == changed
    assert all(name.endswith("seed") for name in names)


def test_the_sampler_of_difficulty_pools_gets_the_seed_too() -> None:
    pools = b'[orchestrator.train.source.curriculum.sampler]\ntype = "difficulty_pool"\n'
    tree = dict(leaves(launch_of(config.parse(SHIPPED + pools), RUN_DIR, seed=1003).tree))
    assert tree["orchestrator.train.source[0].curriculum.sampler.seed"] == 1003


# --- processes ---------------------------------------------------------------------------------------


# Colours in log files, and Weights & Biases, which is off.
LEFT_OUT = ("LOGURU_FORCE_COLORS", "WANDB_")


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


def test_two_runs_side_by_side_share_only_the_installation(tmp_path: Path) -> None:
    with ExitStack() as held:
        ports = [free_ports()]
        for port in ports[0].all:
            held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        ports.append(free_ports())
    assert len({*ports[0].all, *ports[1].all}) == 10
    one, other = (
        launch_of(variant("lora"), tmp_path / clone / "runs" / "0001" / "run-1", ports=each, gpu_ids=gpu_ids)
        for clone, each, gpu_ids in zip("ab", ports, ((0, 1), (2, 3)), strict=True)
    )

    def places(launch: Launch) -> set[str]:
        words = [word for command in launch.commands for word in (*command.argv, *command.env.values())]
        words += [str(value) for _, value in leaves(launch.tree)]
        return {word for word in words if word.count("/") > 1 or ":" in word}

    shared = places(one) & places(other)
    programs = {command.argv[0] for command in one.commands}
    assert shared == {*ENVIRONMENT.values(), *programs, str(VALIDATOR)} | {
        value for value in shared if value.startswith("expandable_segments:")
    }
    run_ids = [{command.env["PRL_RUN_ID"] for command in launch.commands} for launch in (one, other)]
    assert len(run_ids[0]) == len(run_ids[1]) == len(run_ids[0] | run_ids[1]) - 1 == 1


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightshift.engines.prime_rl_ports._PORT_RANGE", range(23_400, 23_412))
    with socket.create_server(("127.0.0.1", 23_405)):
        for _ in range(20):
            found = free_ports().all
            assert len(set(found)) == 5
            assert 23_405 not in found


def test_no_free_port_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightshift.engines.prime_rl_ports._PORT_RANGE", range(23_420, 23_421))
    with pytest.raises(Exception, match=r"no free port among 23420-23421\. See what listens"):
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


def test_what_is_written_is_what_the_first_two_processes_read(tmp_path: Path) -> None:
    launch = launch_of(variant("lora"), tmp_path)
    launch.write()
    argv = {command.name: command.argv for command in launch.commands}
    assert json.loads(Path(argv["inference"][-1]).read_bytes()) == launch.inference_json
    tree_path, configs_dir, verdict = map(Path, argv["validator"][-3:])
    assert json.loads(tree_path.read_bytes()) == launch.tree
    assert verdict == launch.verdict
    later = [argv["orchestrator"][-1], argv["trainer"][-1], argv["env-server"][-1]]
    assert [Path(path).relative_to(configs_dir).as_posix() for path in later] == [
        "orchestrator.json",
        "trainer.json",
        "envs/train/gsm8k.json",
    ]
    assert launch.broadcasts_dir.parent == launch.prime_dir
    assert launch.prime_dir.is_dir()


def test_a_dry_run_shows_everything(tmp_path: Path) -> None:
    launch = launch_of(variant("train"), tmp_path / "run 1", gpu_ids=(2, 3))
    text = "\n".join(describe(launch))
    for port in PORTS.all:
        assert str(port) in text
    assert "inference 2, trainer 3" in text
    for command in launch.commands:
        assert f"{command.argv[0]} " in text
        for name, value in command.env.items():
            assert f"{name}={value}" in text
    for path, value in leaves(launch.tree):
        assert f"{path} = {json.dumps(value)}" in text
    assert "\nGPUs:     none" in "\n" + "\n".join(describe(launch_of(variant("train"), tmp_path, gpu_ids=())))

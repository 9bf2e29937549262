"""The config tree of prime-rl: every value against the recorded schema, and against what train.toml says."""

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from nightshift.config.allowlist import ANY, BY_PRESET, KEYS, OPPONENT, SOURCE, lock
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import parse, set_values
from nightshift.engines.prime_rl.config import effective, fixed
from nightshift.engines.prime_rl.launch import Launch, free_ports
from nightshift.errors import ConfigError, EngineError
from nightshift.executors.process import engine_environment
from tests.prime_rl_plans import SHIPPED, VARIANTS, launch_of, leaves, open_configs, samples, variant
from tests.rules import GSM8K_PRIME_RL as RULES
from tests.rules import ROOT

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED: dict[str, dict[str, Any]] = json.loads((FIXTURES / "rlconfig-keys.json").read_text())
PROMPT_TOKENS = 448  # of gsm8k
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
LOGS = ("enable_log_requests", "enable_log_outputs")
PASSED_THROUGH = {
    f"inference.vllm.{name}" for name in ("generation_config", "max_num_seqs", "max_num_batched_tokens", *LOGS)
}


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
    if (value is None and entry.get("nullable")) or (
        value == {} and any(k.startswith((f"{name}.", f"{name}<")) for k in RECORDED)
    ):
        return None  # the latter is a table that is on
    fits = any(Draft202012Validator(shape).is_valid(value) for shape in entry.get("types", [entry]))
    return None if fits else f"{value!r} is none of {entry}"


def disagreements(tree: Any) -> dict[str, str]:
    found = {path: disagreement(path, value) for path, value in recorded_leaves(tree)}
    return {path: problem for path, problem in found.items() if problem}


def test_every_value_of_every_plan_is_a_key_of_prime_rl_with_a_value_that_it_takes() -> None:
    for name, each in {**{name: variant(name) for name in VARIANTS}, **open_configs()}.items():
        assert disagreements(launch_of(each, RUN_DIR).tree) == {}, name
    refused = {key.path for key in KEYS for value in samples(key) if f"{key.path} = {value}" not in open_configs()}
    # These need two environments, a game, or a longer context.
    assert {path.removeprefix("orchestrator.train.") for path in refused} == {
        *("ratio.*", "opponent.type", "opponent.temperature", "opponent.interval", "sampling.max_completion_tokens")
    }


def test_what_the_agent_writes_arrives_as_it_stands() -> None:
    for name, each in {"train": variant("train"), **open_configs()}.items():
        tree = launch_of(each, RUN_DIR).tree
        for path, value in each.values.items():
            if path.endswith("curriculum.sampler.type") and value == "standard":
                continue  # is what a source without a curriculum does
            if path.endswith("initial_inflight") and "orchestrator.concurrency.max_inflight" not in each.values:
                continue  # two batches at most: tested below
            node: Any = tree
            for segment in path.replace(f"{SOURCE}.", f"{SOURCE}.[0].").split("."):
                node = node[0] if segment == "[0]" else node[segment]
            wanted = list(value) if isinstance(value, tuple) else value
            assert node == wanted or (wanted == {} and isinstance(node, dict)), f"{name}: {path}"


def test_nothing_that_the_engine_fixes_can_be_written_in_train_toml() -> None:
    paths = [path for path, _ in leaves(fixed(RULES, PROMPT_TOKENS))]
    assert len(paths) > 20
    for path in (re.sub(r"\[\d+\]", "", path) for path in paths):
        assert lock(tuple(path.split("."))) is not None, path
        for value in ("1", '"x"', "[[]]", "{ x = 1 }"):
            with pytest.raises(ConfigError):
                parse(f"{path} = {value}\n".encode())


def test_a_default_that_is_written_out_changes_nothing() -> None:
    base = b"max_steps = 1000\n[orchestrator]\ngroup_size = 2\n"
    for key in KEYS:
        if key.default is None or ANY in key.path or key.path == "orchestrator.group_size" or key.table == OPPONENT:
            continue  # an opponent is for a game
        needed = {key.only_if[0]: key.only_if[1][0]} if key.only_if and key.only_if[1] != (None,) else {}
        without, with_it = (parse(set_values(base, needed | more)) for more in ({}, {key.path: key.default}))
        if key.path not in without.resolved:
            continue  # it switches a table on
        by_preset = bool(BY_PRESET & with_it.values.keys())  # prime-rl's default, and not what silence means
        assert (without.hash != with_it.hash) is by_preset, key.path
        if by_preset:
            continue
        assert effective(without, RULES, PROMPT_TOKENS) == effective(with_it, RULES, PROMPT_TOKENS), key.path


def test_the_server_s_context_holds_the_longest_rollout_and_the_longest_answer() -> None:
    settings = effective(variant("train"), RULES, PROMPT_TOKENS)
    [length] = [value for path, value in leaves(settings) if path.endswith("max_model_len")]
    assert length - PROMPT_TOKENS >= max(RULES.max_completion_tokens, RULES.decoding.max_completion_tokens)


def test_the_server_logs_no_prompt_and_keeps_no_prefix_whatever_the_config_and_the_shell_say() -> None:
    """vLLM logs a prompt where enable_log_requests meets the level DEBUG. (Its recorded log holds none.) At the pin an
    update leaves the prefix cache as it is, and the salt of the version never comes to vLLM.
    """
    shell = dict.fromkeys(
        ("VLLM_LOGGING_CONFIG_PATH", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "VLLM_TRACE_FUNCTION"), "1"
    )
    for source in open_configs().values():
        launch = launch_of(source, RUN_DIR)
        vllm = launch.tree["inference"]["vllm"]
        assert [vllm[name] for name in (*LOGS, "enable_prefix_caching")] == [False] * 3
    for command in launch.commands.values():
        passed = engine_environment({"VLLM_LOGGING_LEVEL": "DEBUG", **shell}, command.env)
        assert not {"VLLM_LOGGING_LEVEL", *shell} & set(passed)


@pytest.mark.parametrize(
    ("text", "bound", "initial"),
    [
        ("", 256, None),  # prime-rl's batch of 128
        ("batch_size = 64\nconcurrency.initial_inflight = 512", 128, 128),  # more would be too old for the trainer
        ("token_batch_size = 65536", 1024, None),
        ("concurrency.max_inflight = 64", 64, None),
        ("concurrency = {initial_inflight = 2000, max_inflight = 2000}", 2000, 2000),
    ],
)
def test_no_more_than_two_batches_are_in_flight_unless_the_file_says_so(text, bound, initial):
    settings = effective(parse(f"[orchestrator]\ngroup_size = 4\n{text}\n".encode()), RULES, PROMPT_TOKENS)
    found = settings["orchestrator"]["concurrency"]
    assert (found["max_inflight"], found["initial_inflight"]) == (bound, initial)


def test_a_rollout_longer_than_the_server_s_context_is_refused_with_its_line() -> None:
    source = SHIPPED.replace(b"max_completion_tokens = 512", b"max_completion_tokens = 2049")
    source = source.replace(b"seq_len = 2048 ", b"seq_len = 4096 ")
    line = source.decode().split("\n").index(next(line for line in source.decode().split("\n") if "= 2049" in line)) + 1
    with pytest.raises(ConfigError, match=f"train.toml:{line}: .*= 2049: .*up to 2048 tokens.*Write .* = 2048 or less"):
        effective(parse(source), RULES, PROMPT_TOKENS)


def test_only_seeds_tell_runs_of_one_config_apart() -> None:
    pools = parse(SHIPPED + b'[orchestrator.train.source.curriculum.sampler]\ntype = "difficulty_pool"\n')
    one, again, other = (dict(leaves(launch_of(pools, RUN_DIR, seed=seed).tree)) for seed in (1, 1, 2))
    assert one == again
    source = "orchestrator.train.source[0]"
    seeds = {"inference.vllm.seed", f"{source}.env.taskset.seed", f"{source}.curriculum.sampler.seed"}
    assert {name for name in one if one[name] != other[name]} == seeds


@pytest.mark.parametrize("name", VARIANTS)
def test_plan_of_a_shipped_configuration_is_the_golden_one(name: str) -> None:
    """Written only by `NIGHTSHIFT_WRITE_GOLDEN=1 pytest FILE`; read the difference before it is committed."""
    path, launch = FIXTURES / "prime_rl" / "golden" / f"{name}.json", launch_of(variant(name), RUN_DIR)
    found = {"served_model": launch.served_model, "tree": launch.tree}
    if os.environ.get("NIGHTSHIFT_WRITE_GOLDEN"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(path.read_bytes())


# Colours in log files, and Weights & Biases, which is off.
LEFT_OUT = ("LOGURU_FORCE_COLORS", "WANDB_")


def test_the_processes_are_those_that_prime_rl_s_own_launcher_was_recorded_to_start() -> None:
    _, *commands = launch_of(variant("train"), RUN_DIR).commands.values()  # without the validator
    recorded = json.loads((FIXTURES / "prime_rl" / "launcher.json").read_bytes())
    for command, (argv, added) in zip(commands, recorded, strict=True):
        ours = [word.replace(f"{RUN_DIR}/configs", "<run>/configs") for word in command.argv]
        ours[0] = ours[0].rpartition("/")[2]
        ours = [re.sub(r"^(--rdzv-id=|--log-dir=).*", r"\1...", word) for word in ours]
        theirs = [re.sub(r"^(--rdzv-id=|--log-dir=).*", r"\1...", word) for word in argv]
        assert ours == [word for word in theirs if word != "--local-ranks-filter=0"]  # ours logs all ranks
        wanted = {name: value for name, value in added.items() if not name.startswith(LEFT_OUT)}
        assert wanted.items() <= command.env.items()


def test_each_gpu_has_its_process_and_none_means_none() -> None:
    def devices(launch: Launch) -> dict[str, str | None]:
        return {name: command.env.get("CUDA_VISIBLE_DEVICES") for name, command in launch.commands.items()}

    others = {"validator": None, "env-server": None, "orchestrator": None}
    assert devices(launch_of(variant("train"), RUN_DIR, gpu_ids=(2, 3))) == others | {"inference": "2", "trainer": "3"}
    assert devices(launch_of(variant("train"), RUN_DIR, gpu_ids=())) == others | {"inference": "", "trainer": ""}
    for infer, train, parallel, served, trained in (
        (1, 3, 1, "3", "0,1,2"),
        (2, 6, 2, "3,0", "1,2,4,5,6,7"),
    ):
        chosen = Chosen(environments=["gsm8k"], infer_gpus=infer, train_gpus=train, tensor_parallel=parallel)
        rules = rules_of(ROOT, chosen, None, 8)
        launch = launch_of(variant("train"), RUN_DIR, rules=rules, gpu_ids=(3, 0, 1, 2, 4, 5, 6, 7)[: infer + train])
        assert devices(launch) == others | {"inference": served, "trainer": trained}
        assert f"--nproc-per-node={train}" in launch.commands["trainer"].argv
        assert (launch.is_shared, launch.num_engines) == (False, infer // parallel)


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # one that nobody else has, whatever runs beside
        taken = server.getsockname()[1]
        monkeypatch.setattr("nightshift.engines.prime_rl.launch._PORT_RANGE", range(taken - 6, taken + 6))
        for _ in range(20):
            first = free_ports(1)
            assert taken not in range(first, first + 5)
        monkeypatch.setattr("nightshift.engines.prime_rl.launch._PORT_RANGE", range(taken, taken + 1))
        with pytest.raises(EngineError, match=rf"no free ports in {taken}-{taken + 1}\. List listening"):
            free_ports(1)

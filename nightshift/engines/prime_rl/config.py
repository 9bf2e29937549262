"""The config of prime-rl: the allowed keys of train.toml, and the values that the rules and the engine fix.

In comments, `C/` and `P/` are packages/prime-rl-configs/src/prime_rl/configs/ and src/prime_rl/ at the pinned commit,
and `V/` is verifiers/v1/ of the pinned verifiers.
"""

import copy
from collections.abc import Sequence
from typing import Any

from nightshift.config.allowlist import CURRICULUM, OPPONENT, RATIO, SOURCE, Value, resolve
from nightshift.config.losses import in_prime_rl
from nightshift.config.rules import EnvironmentRules, Rules, TasksetRules
from nightshift.config.train_toml import Config
from nightshift.engines.base import LEARNING_RATES, Settings, size_of
from nightshift.engines.mixture import opponent, ratios, where
from nightshift.errors import ConfigError

Tree = dict[str, Any]  # a config of prime-rl, or a part of it, as nested tables
AC, AC_OFFLOADING, OFFLOAD = (f"trainer.model.{name}" for name in ("ac", "ac_offloading", "optim_cpu_offload"))
SHARE = "inference.vllm.gpu_memory_utilization"
TENSOR_PARALLEL = "inference.vllm.tensor_parallel_size"


def preset(memory: str) -> dict[str, Value]:
    """Return the defaults for the GPUs of `Rules.memory` and models below 1B. They were computed, not measured."""
    is_shared, size = size_of(memory)
    ac: Value = {} if size <= (24 if is_shared else 16) else None
    share = {24: 0.35}.get(size, 0.4) if is_shared else 0.9
    return {OFFLOAD: is_shared and size == 16, AC: ac, AC_OFFLOADING: None, SHARE: share}


def with_defaults(config: Config, memory: str) -> dict[str, Value]:
    """Return every allowed key that applies. The memory preset's defaults override prime-rl's."""
    defaults = preset(memory)
    if config.values.get(AC_OFFLOADING) is not None:
        del defaults[AC]  # ac_offloading implies ac
    if config.values.get("trainer.model.fsdp_cpu_offload"):
        defaults[OFFLOAD] = False  # prime-rl refuses both together
    return resolve({**defaults, **config.values})


HOST = "127.0.0.1"
TRAINER_METRICS, ORCHESTRATOR_METRICS = "metrics-trainer.jsonl", "metrics-orchestrator.jsonl"
NUM_ENV_WORKERS = 4  # verifiers' default for a static pool
ADAPTER = "trainer.model.lora"
_SAMPLER = f"{CURRICULUM}.sampler.type"
_INFLIGHT, _INITIAL = (f"orchestrator.concurrency.{name}_inflight" for name in ("max", "initial"))
INFLIGHT_BATCHES = 2  # the server samples one batch while the trainer trains on another
_LENGTH = "orchestrator.train.sampling.max_completion_tokens"


def effective(config: Config, rules: Rules, prompt_tokens: int) -> Tree:
    """Return the RLConfig tree of a checked train.toml under `rules`, without values that depend on a single run.

    The tree contains every allowed and every fixed key, so that two files that train the same give the same tree.
    ConfigError: these rules do not allow a value.

    `prompt_tokens`: tokens for a prompt, in addition to the longest completion.
    """
    length, cap = config.get(_LENGTH), rules.max_completion_tokens
    if length is not None and length > cap:  # longer than the server's context: it would refuse every request
        cause = f"{where(config, _LENGTH)}: these rules serve completions of up to {cap} tokens"
        raise ConfigError(cause, f"Write max_completion_tokens = {cap} or less")
    values: dict[str, Any] = {**with_defaults(config, rules.memory), **fixed(rules, prompt_tokens)}
    values |= in_prime_rl(config, rules.losses)
    for environment in rules.environments:
        if environment.taskset and environment.taskset.max_turns > 1:
            room = environment.taskset.room(length or cap)
            if values["seq_len"] < room:  # prime-rl truncates a longer sample
                name = environment.name
                cause = f"{where(config, 'seq_len')}: a conversation of {name} may have {room} tokens"
                fix = f"Write seq_len = {room}, or lower max_completion_tokens, or a limit in [environment.{name}]"
                raise ConfigError(cause, fix)
    if values[_INFLIGHT] is None:
        # Each batch in flight makes rollouts one version older. prime-rl's default of 1,024 rollouts made all of them 8
        # versions old (measured), the limit max_off_policy_steps.
        batch = values.get("orchestrator.batch_size")  # None: the size is in tokens
        least = (values[f"orchestrator.{name}"] or 1 for name in ("concurrency.min_inflight", "group_size"))
        values[_INFLIGHT] = max(INFLIGHT_BATCHES * batch if batch else 1024, *least)
        values[_INITIAL] = values[_INITIAL] and min(values[_INITIAL], values[_INFLIGHT])
    if values.get(_SAMPLER) == "standard":
        del values[_SAMPLER]  # the default of a source without a curriculum (P/orchestrator/curriculum/base.py)
    if values.get(ADAPTER) is not None:  # the default name of C/rl.py:566
        values["orchestrator.model.lora.name"] = f"r{values[f'{ADAPTER}.rank']}-a{values[f'{ADAPTER}.alpha']}"
    for path in LEARNING_RATES:
        if values.get(path):
            values[path] *= rules.learning_rate_scale
    shares, other = ratios(config, rules), opponent(config, rules)
    if other.get("type") == "previous":
        cause = f"{where(config, f'{OPPONENT}.type')}: the server of prime-rl has only the current policy"
        raise ConfigError(cause, 'Write type = "self" or "pool".')
    values = {path: value for path, value in values.items() if not path.startswith((f"{RATIO}.", f"{OPPONENT}."))}
    below = f"{SOURCE}."  # the curriculum of train.toml, which applies to every source
    curriculum = {path.removeprefix(below): values.pop(path) for path in list(values) if path.startswith(below)}
    for environment, source in zip(rules.environments, values[SOURCE], strict=True):
        if shares:
            source["ratio"] = shares[environment.name]
        source |= _nested(curriculum)
        if environment.is_game:
            temperature = {"sampling": {"temperature": other["temperature"]}} if other["type"] == "self" else {}
            source["env"] |= {"played_by": other["type"], "opponent": source["env"]["agent"] | temperature}
    return _nested(values)


def with_seed(settings: Settings, seed: int) -> Tree:
    """Return the settings of `effective` with the seed of a run, for the server and the order of the examples."""
    tree: Tree = copy.deepcopy(dict(settings))
    tree["inference"]["vllm"]["seed"] = seed
    for source in tree["orchestrator"]["train"]["source"]:
        source["env"]["taskset"]["seed"] = seed
        sampler = source.get("curriculum", {}).get("sampler", {})
        if sampler.get("type") == "difficulty_pool":
            sampler["seed"] = seed
    return tree


def _nested(values: Settings) -> Tree:
    """Return dotted keys as nested tables, with tuples as lists."""
    tree: Tree = {}
    for path, value in values.items():
        *tables, leaf = path.split(".")
        node = tree
        for table in tables:
            node = node.setdefault(table, {})
        node[leaf] = list(value) if isinstance(value, tuple) else copy.copy(value)  # a later key may extend a table
    return tree


def fixed(rules: Rules, prompt_tokens: int) -> dict[str, Any]:
    """Return the locked keys with their values, which train.toml cannot set."""
    tasksets = [scored.taskset for scored in rules.scored if scored.taskset and scored.taskset.max_turns > 1]
    completion = max(rules.max_completion_tokens, rules.decoding.max_completion_tokens)
    context = max([prompt_tokens + completion, *(taskset.room(completion) for taskset in tasksets)])
    return {
        "clean": False,  # true deletes the run folder, even in a dry run
        "model.name": rules.model,
        # "auto" is refused for Qwen2.5, which the map of renderers does not contain (C/orchestrator.py:584).
        "orchestrator.renderer.name": "default",
        # "auto" is flash attention 3 or 4 on newer GPUs, which the Qwen2 of transformers refuses
        # (P/trainer/model.py:734,1293).
        "trainer.model.attn": "flash_attention_2",
        SOURCE: [_source(environment) for environment in rules.environments],
        "deployment.type": "single_node",
        "deployment.gpus_per_node": rules.infer_gpus + rules.train_gpus,
        "deployment.num_infer_gpus": rules.infer_gpus,
        "deployment.num_train_gpus": rules.train_gpus,
        **({TENSOR_PARALLEL: rules.tensor_parallel} if rules.tensor_parallel > 1 else {}),
        # NCCL, the default, writes no files, and does not send the last step (P/trainer/rl/train.py:582).
        "weight_broadcast.type": "filesystem",
        "rollout_transport.type": "zmq",
        "rollout_transport.host": HOST,
        "inference.server.host": HOST,
        "inference.router": None,  # its program is in another extra
        "inference.vllm.max_model_len": context,
        **_tools(tasksets),
        # By default, missing sampling parameters come from the model's file, which has a repetition penalty.
        "inference.vllm.generation_config": "vllm",
        # With a prefix cache, rollouts would begin with keys and values of older weights: an update does not clear the
        # cache (P/inference/vllm/server.py:73), and the salt of the policy's version does not reach vLLM
        # (P/inference/vllm/serving_tokens.py:227).
        "inference.vllm.enable_prefix_caching": False,
        # The prompts of the test split must not be in a log.
        "inference.vllm.enable_log_requests": False,
        "inference.vllm.enable_log_outputs": False,
        "trainer.monitors.file.path": TRAINER_METRICS,
        "orchestrator.monitors.file.path": ORCHESTRATOR_METRICS,
    }


# vLLM's name of a tool parser -> the name in prime-rl's renderers (V/renderers).
_RENDERER_PARSERS = {"hermes": "qwen3", "qwen3_coder": "qwen3.5", "glm45": "glm", "deepseek_v3": "deepseek-v3"}


def _tools(tasksets: Sequence[TasksetRules]) -> dict[str, str]:
    """Return the tool parsers of the server and the renderer."""
    names = {taskset.tool_parser for taskset in tasksets if taskset.tool_parser}
    if len(names) > 1 or not names <= _RENDERER_PARSERS.keys():
        fix = f"Write one of: {', '.join(_RENDERER_PARSERS)}, the same in each environment"
        raise ConfigError(f"rules.toml: tool_parser is {' and '.join(sorted(names))}", fix)
    for name in names:
        renderer = _RENDERER_PARSERS[name]
        return {"inference.vllm.tool_call_parser": name, "orchestrator.renderer.tool_parser": renderer}
    return {}


def _source(environment: EnvironmentRules) -> Tree:
    """Return the source of one environment. A user's taskset has its agents in the generated package (install.py)."""
    # The default runtime is a paid remote sandbox (V/configs/agent.py:29).
    seat = {"harness": {"id": environment.package}, "runtime": {"type": "subprocess"}}
    taskset = {"id": environment.package, "split": "train", "size": environment.num_train, **environment.args}
    own = {"taskset": {"id": environment.package}}
    return {
        "name": environment.name,
        "env": own if environment.taskset else {"taskset": taskset, "agent": seat},
        "serve": {"pool": {"type": "static", "num_workers": NUM_ENV_WORKERS}},
    }

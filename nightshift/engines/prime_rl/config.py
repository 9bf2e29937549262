"""What prime-rl trains with: the allow-listed train.toml plus what the rules and the engine fix.

A nested tree in prime-rl's own names that its RLConfig accepts, without anything that depends on a single
run. `C/` and `P/` are packages/prime-rl-configs/src/prime_rl/configs/ and src/prime_rl/ at the pinned commit, `V/` is
verifiers/v1/ of the verifiers that it pins.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from nightshift.config.allowlist import CURRICULUM, OPPONENT, SOURCE, Value, resolve
from nightshift.config.losses import in_prime_rl
from nightshift.config.rules import EnvironmentRules, Rules, TasksetRules
from nightshift.config.train_toml import Config
from nightshift.engines.base import LEARNING_RATES, size_of
from nightshift.engines.mixture import opponent, ratios, where, without
from nightshift.errors import ConfigError

AC, AC_OFFLOADING, OFFLOAD = (f"trainer.model.{name}" for name in ("ac", "ac_offloading", "optim_cpu_offload"))
SHARE = "inference.vllm.gpu_memory_utilization"
TENSOR_PARALLEL = "inference.vllm.tensor_parallel_size"


def preset(memory: str) -> dict[str, Value]:
    """Return the defaults for the cards of `Rules.memory`, which nobody measured. On one card the server takes its
    share first. They are for models below 1B: prime-rl's own save memory that is not short on a large card."""
    is_one, size = size_of(memory)
    ac: Value = {} if size <= (24 if is_one else 16) else None
    share = {24: 0.35}.get(size, 0.4) if is_one else 0.9
    return {OFFLOAD: is_one and size == 16, AC: ac, AC_OFFLOADING: None, SHARE: share}


def with_defaults(config: Config, memory: str) -> dict[str, Value]:
    """Return every open key that applies. If train.toml has no value, the card's default holds, else prime-rl's."""
    defaults = preset(memory)
    if config.values.get(AC_OFFLOADING) is not None:
        del defaults[AC]  # it would switch it on, whatever is said here
    if config.values.get("trainer.model.fsdp_cpu_offload"):
        defaults[OFFLOAD] = False  # prime-rl refuses the two together: that one has all on the CPU
    return resolve({**defaults, **config.values})


HOST = "127.0.0.1"
TRAINER_METRICS, ORCHESTRATOR_METRICS = "metrics-trainer.jsonl", "metrics-orchestrator.jsonl"
NUM_ENV_WORKERS = 4  # verifiers' own number for a static pool: 512 rollouts are 128 coroutines in each
ADAPTER = "trainer.model.lora"
_SAMPLER = f"{CURRICULUM}.sampler.type"
_INFLIGHT, _INITIAL = (f"orchestrator.concurrency.{name}_inflight" for name in ("max", "initial"))
INFLIGHT_BATCHES = 2  # one is answered while one is trained on
_LENGTH = "orchestrator.train.sampling.max_completion_tokens"


def effective(config: Config, rules: Rules, prompt_tokens: int) -> dict[str, Any]:
    """The RLConfig tree of a checked train.toml under `rules`: JSON values only, the same for every run.

    `prompt_tokens`: room for a prompt of the environment beside the longest completion.

    Complete as far as keys are open or fixed, so that two files that train the same give the same tree.

    Raises:
        ConfigError: a value that these rules do not allow.
    """
    length, cap = config.get(_LENGTH), rules.max_completion_tokens
    if length is not None and length > cap:  # the server's context could not contain it: it would refuse each request
        cause = f"{where(config, _LENGTH)}: these rules serve completions of up to {cap} tokens"
        raise ConfigError(cause, f"Write max_completion_tokens = {cap} or less")
    values: dict[str, Any] = {**with_defaults(config, rules.memory), **fixed(rules, prompt_tokens)}
    values |= in_prime_rl(config, rules.losses)
    for one in rules.environments:
        if one.taskset and one.taskset.max_turns > 1:
            room, words = one.taskset.room(length or cap)
            if values["seq_len"] < room:  # prime-rl cuts a longer sample
                cause = f"{where(config, 'seq_len')}: a conversation of {one.name} may have {room} tokens: {words}"
                fix = f"Write seq_len = {room}, a lower max_completion_tokens, or less in [environment.{one.name}]"
                raise ConfigError(cause, fix)
    if values[_INFLIGHT] is None:
        values[_INFLIGHT] = most_inflight(values)
        values[_INITIAL] = values[_INITIAL] and min(values[_INITIAL], values[_INFLIGHT])
    if values.get(_SAMPLER) == "standard":
        del values[_SAMPLER]  # what a source does without a curriculum (P/orchestrator/curriculum/base.py)
    if values.get(ADAPTER) is not None:
        # the name that C/rl.py:566 would choose
        rank, alpha = values[f"{ADAPTER}.rank"], values[f"{ADAPTER}.alpha"]
        values["orchestrator.model.lora.name"] = f"r{rank}-a{alpha}"
    for path in LEARNING_RATES:
        if values.get(path):
            values[path] *= rules.learning_rate_scale
    shares, other = ratios(config, rules), opponent(config, rules)
    if other.get("type") == "previous":
        cause = f"{where(config, f'{OPPONENT}.type')}: the server of prime-rl holds one policy, that of now"
        raise ConfigError(cause, 'Write type = "self" or "pool".')
    games = {one.name for one in rules.environments if one.is_game}
    values = without(values)
    below = f"{SOURCE}."  # the agent's curriculum, which stands in every entry of the list
    curriculum = {path.removeprefix(below): values.pop(path) for path in list(values) if path.startswith(below)}
    values[SOURCE] = [
        {**source, **({"ratio": shares[source["name"]]} if shares else {}), **_nested(curriculum)}
        for source in values.pop(SOURCE)
    ]
    for env in (source["env"] for source in values[SOURCE] if source["name"] in games):
        temperature = {"sampling": {"temperature": other["temperature"]}} if other["type"] == "self" else {}
        env |= {"played_by": other["type"], "opponent": env["agent"] | temperature}
    return _nested(values)


def with_seed(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the settings of `effective` with the seed of a run: of the server, and of the order of the examples."""
    tree: dict[str, Any] = copy.deepcopy(dict(settings))
    tree["inference"]["vllm"]["seed"] = seed
    for source in tree["orchestrator"]["train"]["source"]:
        source["env"]["taskset"]["seed"] = seed
        sampler = source.get("curriculum", {}).get("sampler", {})
        if sampler.get("type") == "difficulty_pool":
            sampler["seed"] = seed
    return tree


def most_inflight(values: Mapping[str, Any]) -> int:
    """The most rollouts in flight where train.toml does not say: each batch of them makes rollouts a version older.

    Measured over 600 s with prime-rl's own bound of 1,024, sixteen batches there: the number in flight grew until every
    rollout was 8 versions old, which is max_off_policy_steps. So a smaller batch lowers initial_inflight too.
    """
    batch = values.get("orchestrator.batch_size")  # None: a batch of tokens, of nobody knows how many rollouts
    least = ("concurrency.min_inflight", "group_size")
    return max(INFLIGHT_BATCHES * batch if batch else 1024, *(values[f"orchestrator.{name}"] or 1 for name in least))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables, tuples as lists; None is JSON's null."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *tables, leaf = path.split(".")
        node = tree
        for table in tables:
            node = node.setdefault(table, {})
        node[leaf] = {} if value == {} else list(value) if isinstance(value, tuple) else value
    return tree


def context_tokens(rules: Rules, prompt_tokens: int) -> int:
    """Return how many tokens the longest conversation of an experiment may need."""
    completion = max(rules.max_completion_tokens, rules.decoding.max_completion_tokens)
    several = [one.taskset for one in rules.scored if one.taskset and one.taskset.max_turns > 1]
    return max([prompt_tokens + completion, *(one.room(completion)[0] for one in several)])


def fixed(rules: Rules, prompt_tokens: int) -> dict[str, Any]:
    """The values that train.toml cannot name, dotted; all of them are locked keys."""
    several = [one.taskset for one in rules.scored if one.taskset and one.taskset.max_turns > 1]
    return {
        "clean": False,  # a run folder is used once; with true, even a dry run deletes it
        "model.name": rules.model,
        # Qwen2.5 is no key of the renderers' own map, so "auto" is refused (C/orchestrator.py:584).
        "orchestrator.renderer.name": "default",
        # "auto" is flash attention 3 on Hopper and 4 on Blackwell, which the Hugging Face implementation,
        # the only one of Qwen2, refuses (P/trainer/model.py:734,1293).
        "trainer.model.attn": "flash_attention_2",
        SOURCE: [_source(environment) for environment in rules.environments],
        "deployment.type": "single_node",
        # prime-rl derives data parallelism, API servers and the trainer's processes from these.
        "deployment.gpus_per_node": rules.infer_gpus + rules.train_gpus,
        "deployment.num_infer_gpus": rules.infer_gpus,
        "deployment.num_train_gpus": rules.train_gpus,
        **({TENSOR_PARALLEL: rules.tensor_parallel} if rules.tensor_parallel > 1 else {}),
        # The default, NCCL, leaves no file to evaluate, and never sends the last step (P/trainer/rl/train.py:582).
        "weight_broadcast.type": "filesystem",
        "rollout_transport.type": "zmq",
        "rollout_transport.host": HOST,
        "inference.server.host": HOST,
        # One engine needs no router in front, and its program is in another extra.
        "inference.router": None,
        # Without a length the server reckons with the model's 32,768 tokens for each rollout.
        "inference.vllm.max_model_len": context_tokens(rules, prompt_tokens),
        **_tools(several),
        # Else missing sampling parameters come from the model's own file: a repetition penalty among them.
        "inference.vllm.generation_config": "vllm",
        # No update clears the cache (P/inference/vllm/server.py:73), and the salt of the policy's version never comes
        # to vLLM: the orchestrator puts it into extra_body (P/orchestrator/envs.py:90), the train client among the
        # sampling parameters (V/clients/train.py:359), and vLLM reads it beside them (P/inference/vllm/
        # serving_tokens.py:227). With a cache, rollouts would begin with keys and values of older weights.
        "inference.vllm.enable_prefix_caching": False,
        # vLLM's own defaults, said here: the test split's prompts lie nowhere below runs/. (Its prompts need the
        # level DEBUG besides, whose variable engine_environment leaves out; a crash dump has lengths only.)
        "inference.vllm.enable_log_requests": False,
        "inference.vllm.enable_log_outputs": False,
        "trainer.monitors.file.path": TRAINER_METRICS,
        "orchestrator.monitors.file.path": ORCHESTRATOR_METRICS,
    }


# Names of prime-rl's renderers (V/renderers) for vLLM's names of how a model calls tools.
_RENDERER_PARSERS = {"hermes": "qwen3", "qwen3_coder": "qwen3.5", "glm45": "glm", "deepseek_v3": "deepseek-v3"}


def _tools(several: Sequence[TasksetRules]) -> dict[str, str]:
    """Return how the model calls tools, for the server and for the renderer, which refuses tools without it."""
    names = {one.tool_parser for one in several if one.tool_parser}
    if len(names) > 1 or not names <= _RENDERER_PARSERS.keys():
        fix = f"Write one of: {', '.join(_RENDERER_PARSERS)}, the same in each environment"
        raise ConfigError(f"rules.toml: tool_parser is {' and '.join(sorted(names))}", fix)
    for name in names:
        renderer = _RENDERER_PARSERS[name]
        return {"inference.vllm.tool_call_parser": name, "orchestrator.renderer.tool_parser": renderer}
    return {}


def _source(environment: EnvironmentRules) -> dict[str, Any]:
    """One environment: our taskset and harness in verifiers' single-agent environment, inside the worker; the seats of
    a user's package are in the package that the installer writes (environments/taskset)."""
    seats = {"agent": {"harness": {"id": environment.package}, "runtime": {"type": "subprocess"}}}
    sizes = {} if environment.taskset else {"split": "train", "size": environment.num_train, **environment.args}
    return {
        "name": environment.name,
        "env": {
            "taskset": {"id": environment.package, **sizes},
            # The default runtime is a paid sandbox elsewhere (V/configs/agent.py:29); ours starts nothing.
            **({} if environment.taskset else seats),
        },
        "serve": {"pool": {"type": "static", "num_workers": NUM_ENV_WORKERS}},
    }

"""The allow-list: every key that train.toml may hold, and who owns the ones that it may not.

Names, types, ranges and defaults are prime-rl's own (commit in pyproject.toml); a test holds each
entry against a recording of prime-rl's config classes. A range is tighter than prime-rl's only where
a comment says why. Everything that is not in `KEYS` is refused.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from nightshift.train_toml.values import Key, Kind, Value, value_text

INT, FLOAT, BOOL, CHOICE, LIST, TABLE = Kind.INT, Kind.FLOAT, Kind.BOOL, Kind.CHOICE, Kind.LIST, Kind.TABLE

ANY = "*"  # one path segment that the agent names
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")

SOURCE = "orchestrator.train.source"  # a list in prime-rl: its entries belong to the rules
_CURRICULUM = f"{SOURCE}.curriculum"
_ON: dict[str, Any] = {}
_IMPORTS = "it imports code"
_OTHERS = "it needs a teacher, tools or several agents"
# The linear layers of Qwen2 and Llama. prime-rl also takes regular expressions here, which would run
# in the trainer on hostile input and reach nothing that this list does not.
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_ADAM = ("trainer.optim.type", ("adamw", "muon"))
_ADAMW = ("trainer.optim.type", ("adamw",))
_MUON = ("trainer.optim.type", ("muon",))
_SGD = ("trainer.optim.type", ("sgd",))
_WARMUP = ("trainer.scheduler.type", ("linear", "cosine"))
_LINEAR = ("trainer.scheduler.type", ("linear",))
_DPPO = ("trainer.loss.type", ("default",))
_IPO = ("trainer.loss.type", ("ipo",))
_GRPO = ("orchestrator.algo.type", ("grpo",))
_RAE = ("orchestrator.algo.type", ("rae",))
_POOLS = (f"{_CURRICULUM}.sampler.type", ("difficulty_pool",))
_ROLLOUTS = ("orchestrator.token_batch_size", (None,))

# TOML table -> its keys. A key stands after the key that selects its variant and after the table that
# holds it.
_TABLES: dict[str, tuple[Key, ...]] = {
    "": (
        # A run of 0 steps would score the base model.
        Key("max_steps", INT, None, "stop after so many steps; unset: at the budget", 1, 1_000_000, nullable=True),
        # Below 32 no prompt fits; the rules' models have 32,768 positions. prime-rl's None means 2048.
        Key("seq_len", INT, 2048, "tokens of a packed row; the rest is cut", 32, 32_768),
    ),
    "orchestrator": (
        # Beyond the upper bounds in this table one step outlasts any night.
        Key("token_batch_size", INT, None, "tokens a step, instead of batch_size", 1, 10_000_000, nullable=True),
        Key("batch_size", INT, 128, "rollouts a step; a multiple of group_size", 1, 65_536, only_if=_ROLLOUTS),
        Key("group_size", INT, 1, "rollouts an example; 2 or more but for rae", 1, 1024),
        Key("max_off_policy_steps", INT, 8, "oldest rollouts that still train, in steps", 0, 1000),
    ),
    "orchestrator.concurrency": (
        Key("initial_inflight", INT, None, "rollouts in flight at the start", 1, 65_536, nullable=True),
        Key("min_inflight", INT, 1, "fewest rollouts in flight", 1, 65_536),
        Key("max_inflight", INT, 1024, "most rollouts in flight", 1, 65_536, nullable=True),
    ),
    "orchestrator.train": (
        Key("filter_zero_advantages", BOOL, True, "drop tokens without advantage from a batch"),
    ),
    "orchestrator.train.sampling": (
        # vLLM lifts a temperature below 0.01 to 0.01; at 0 all rollouts of a group are equal.
        Key("temperature", FLOAT, 1.0, "of training rollouts; evaluation is greedy", 0.01, 2.0),
        # The rules' models have 32,768 positions.
        Key("max_completion_tokens", INT, None, "longest training completion", 1, 32_768, nullable=True),
    ),
    "orchestrator.algo": (
        Key("type", CHOICE, "grpo", "how rewards become advantages", choices=("grpo", "max_rl", "rae"),
            refused=dict.fromkeys(("echo", "hierarchical_grpo", "opd", "opsd", "sft"), _OTHERS)),
        Key("decay", FLOAT, 0.95, "of the reward baseline", 0, below=1, only_if=_RAE),
        Key("length_penalty", TABLE, None, "take a length penalty off each reward", nullable=True, only_if=_GRPO),
    ),
    "orchestrator.algo.length_penalty": (
        Key("type", CHOICE, "linear", "shape of the penalty", choices=("linear",)),
        Key("num_output_tokens_weight", FLOAT, 0.25, "weight of generated tokens", 0),
        Key("num_input_tokens_weight", FLOAT, 0.1, "weight of prompt tokens", 0),
        Key("num_turns_weight", FLOAT, 0.1, "weight of turns", 0),
    ),
    f"{_CURRICULUM}.sampler": (
        Key("type", CHOICE, "standard", "examples in order, or by difficulty", choices=("standard", "difficulty_pool")),
    ),
    f"{_CURRICULUM}.sampler.pools": (
        Key(ANY, TABLE, None, "any name; replaces hard, normal and easy", only_if=_POOLS),
    ),
    f"{_CURRICULUM}.sampler.pools.{ANY}": (
        # Rewards are 0 to 1 here: a threshold outside sorts nothing.
        Key("threshold", FLOAT, None, "required; highest mean reward in the pool", 0, 1),
        Key("weight", FLOAT, None, "required; relative chance of its examples", 0),
    ),
    f"{_CURRICULUM}.gates": (
        Key(ANY, TABLE, None, "any name; only groups that pass it train"),
    ),
    f"{_CURRICULUM}.gates.{ANY}": (
        Key("type", CHOICE, "advantage_range", "kind of gate", choices=("advantage_range",)),
        Key("reject_min", FLOAT, 0.0, "refuse a group with all advantages from here"),
        Key("reject_max", FLOAT, 0.0, "... to here"),
    ),
    "trainer": (
        Key("matmul_precision", CHOICE, "high", "float32 products; high: TF32", choices=("highest", "high", "medium")),
    ),
    "trainer.optim": (
        Key("type", CHOICE, "adamw", "optimizer", choices=("adamw", "sgd", "muon", "sign_sgd")),
        # 0 trains nothing; above 1 no optimizer here is stable.
        Key("lr", FLOAT, 1e-6, "peak learning rate", above=0, maximum=1),
        # Above 1 the weights themselves vanish.
        Key("weight_decay", FLOAT, 0.01, "pull of the weights towards 0", 0, 1),
        # 0 would clip every gradient away.
        Key("max_norm", FLOAT, 1.0, "clip gradients to this norm", above=0, nullable=True),
        # A decay of 1 or more never forgets; torch refuses it after minutes of start-up.
        Key("betas1", FLOAT, 0.9, "decay of the first moment", 0, below=1, only_if=_ADAM),
        Key("betas2", FLOAT, 0.999, "decay of the second moment", 0, below=1, only_if=_ADAMW),
        Key("betas2", FLOAT, 0.95, "decay of the second moment", 0, below=1, only_if=_MUON),
        Key("mu", FLOAT, 0.95, "momentum", 0, below=1, only_if=_MUON),
        Key("momentum", FLOAT, 0.9, "momentum", 0, below=1, only_if=_SGD),
        Key("nesterov", BOOL, True, "Nesterov momentum", only_if=_SGD),
    ),
    "trainer.scheduler": (
        Key("type", CHOICE, "constant", "learning rate over the steps", choices=("constant", "linear", "cosine")),
        Key("warmup_steps", INT, 10, "steps from 0 to lr", 0, only_if=_WARMUP),
        Key("decay_steps", INT, 10, "last steps, lr to min_lr; needs max_steps", 0, only_if=_LINEAR),
        Key("min_lr", FLOAT, 0.0, "learning rate at the end", 0, only_if=_WARMUP),
    ),
    "trainer.loss": (
        Key("type", CHOICE, "default", "policy loss", choices=("default", "ipo"), refused={"custom": _IMPORTS}),
        # These bound differences of probabilities, not ratios: 1 already switches the mask off.
        Key("dppo_mask_low", FLOAT, 0.2, "mask tokens whose probability fell by more", 0, 1, only_if=_DPPO),
        Key("dppo_mask_high", FLOAT, 0.2, "mask tokens whose probability rose by more", 0, 1, only_if=_DPPO),
        Key("ipo_threshold", FLOAT, 0.1, "mask tokens whose probability moved more", 0, 1, only_if=_IPO),
        # At 0 the reward has no say.
        Key("adv_tau", FLOAT, 1.0, "weight of the advantage", above=0),
        Key("kl_tau", FLOAT, 1e-3, "penalty on leaving the sampling policy", 0),
    ),
    "trainer.model": (
        Key("lora", TABLE, None, "train adapters instead of all weights", nullable=True),
        Key("compile", TABLE, _ON, "torch.compile the model", nullable=True),
        Key("ac", TABLE, _ON, "recompute activations: less memory, slower", nullable=True),
        Key("ac_offloading", TABLE, _ON, "activations in CPU memory: slower", nullable=True),
        Key("fsdp_cpu_offload", BOOL, False, "weights and all in CPU memory: slow"),
        Key("optim_cpu_offload", BOOL, True, "optimizer state in CPU memory: slower"),
        Key("reshard_after_forward", BOOL, True, "free gathered weights between passes"),
        Key("optimization_dtype", CHOICE, "float32", "type of the trained weights", choices=("bfloat16", "float32")),
        Key("reduce_dtype", CHOICE, "float32", "type that gradients are summed in", choices=("bfloat16", "float32")),
        Key("fused_lm_head_token_chunk_size", INT, 8192, "tokens a chunk of the output layer", 1, 1_000_000,
            choices=("disabled",)),
    ),
    "trainer.model.lora": (
        # vLLM serves no adapter above rank 512; alpha 0 or dropout 1 leaves nothing of it.
        Key("rank", INT, 16, "rank of the adapters", 1, 512),
        Key("alpha", FLOAT, 32.0, "scale of the adapters, divided by rank", above=0),
        Key("dropout", FLOAT, 0.0, "dropout before the adapters", 0, below=1),
        Key("target_modules", LIST, _LINEARS, "layers with an adapter, of " + " ".join(_LINEARS), choices=_LINEARS),
    ),
    "trainer.model.compile": (
        Key("fullgraph", BOOL, False, "compile without graph breaks"),
    ),
    "trainer.model.ac": (
        Key("freq", INT, 1, "recompute every so many layers", 1),
    ),
    "trainer.model.ac_offloading": (
        Key("pin_memory", BOOL, True, "pin that memory"),
        Key("max_inflight_activations", INT, 5, "activations under way at once", 1),
    ),
    # Only what cannot change an answer.
    "inference.vllm": (
        # Below 0.2 too few sequences fit to evaluate in time; above 0.95 loading new weights fails.
        Key("gpu_memory_utilization", FLOAT, 0.9, "share of GPU memory for the server", 0.2, 0.95),
        # prime-rl hands these two to vLLM as they are: it has no range or default for them.
        Key("max_num_seqs", INT, None, "sequences at once; unset: vLLM chooses", 1, 8192),
        Key("max_num_batched_tokens", INT, None, "tokens a pass; unset: vLLM chooses", 128, 1_000_000),
        Key("enforce_eager", BOOL, False, "no CUDA graphs: slower, starts sooner"),
    ),
}  # fmt: skip

KEYS: tuple[Key, ...] = tuple(replace(key, table=table) for table, keys in _TABLES.items() for key in keys)
_SWITCHES = tuple(key.path for key in KEYS if key.kind is TABLE)


@dataclass(frozen=True, slots=True)
class Lock:
    """Keys that train.toml may not name: who owns them and why."""

    owner: str
    reason: str
    prefixes: tuple[str, ...]


# Segments that are locked wherever they stand.
LOCKED_ANYWHERE: Mapping[str, str] = {
    "env_vars": "they can redirect imports and downloads",
    "extra_body": "it can change what the server does",
    "trust_remote_code": "it runs foreign code",
    "import_path": "it imports code",
}


def _everywhere(*names: str) -> tuple[str, ...]:
    return tuple(side + name for side in ("", "trainer.", "orchestrator.", "inference.") for name in names)


_MODEL = "trainer.model."
_VLLM = "inference.vllm."
LOCKS: tuple[Lock, ...] = (
    Lock("rules", "the model is fixed", (
        "model", "tokenizer", "trainer.tokenizer",
        "orchestrator.model", "orchestrator.tokenizer", "orchestrator.renderer",
        *(_MODEL + name for name in ("name", "vlm", "debug", "impl", "conversion_dir", "index_cache", "quantization")),
        *(_VLLM + name for name in (
            "model", "dtype", "quantization", "chat_template", "rope_scaling", "tool_call_parser", "reasoning_parser",
            "hf_overrides", "tokenizer", "revision", "served_model_name", "load_format", "model_impl",
        )),
    )),
    Lock("rules", "the environment and its rewards are fixed", (
        *(f"{SOURCE}.{name}" for name in ("env", "serve", "name", "ratio")), "trainer.data",
    )),
    Lock("rules", "one setting for all sources: write it once, without source", (
        *(f"{SOURCE}.{name}" for name in ("sampling", "group_size", "algo")),
    )),
    Lock("rules", "seeds are fixed", (f"{_CURRICULUM}.sampler.seed", _VLLM + "seed")),
    Lock("rules", "the harness evaluates by itself", ("orchestrator.eval",)),
    Lock("rules", "it changes what the server answers", (
        "inference.enable_fp32_lm_head", "inference.enable_fp32_router_logits", "inference.use_deep_gemm",
        *(_VLLM + name for name in (
            "max_model_len", "kv_cache_dtype", "generation_config", "override_generation_config", "logprobs_mode",
            "enable_prefix_caching", "speculative_config", "enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank",
            "lora_target_modules",
        )),
    )),
    Lock("rules", "a log must hold no prompt", tuple(_VLLM + f"enable_log_{what}" for what in ("requests", "outputs"))),
    Lock("rules", "it needs a teacher, tools or several agents", tuple(
        f"orchestrator.algo.{name}"
        for name in ("sampling", "filter", "roles", "episode_agents", "teacher", "demo_key", "template", "renderer")
    )),
    Lock("rules", "it imports code", ("trainer.loss.import_path", "trainer.loss.kwargs")),
    Lock("rules", "vLLM cannot serve it, so another policy would be scored", (_MODEL + "lora.modules_to_save",)),
    Lock("rules", "it works only with prime-rl's own model classes", (_MODEL + "ac.mode", _MODEL + "ac.targets")),
    Lock("engine", "one GPU trains, one serves", (
        "deployment", "inference.deployment", "inference.use_pd_kv_transfer", "orchestrator.num_train_workers",
        "orchestrator.pad_to_multiple_of",
        *(_MODEL + name for name in (
            "attn", "cp", "cp_style", "dp_replicate", "ep", "ep_comm_backend", "deepep_num_sms",
            "deepep_token_chunk_size", "moe_fused_kernel", "moe_router_dtype", "moe_use_grouped_mm",
            "freeze_moe_router", "full_offload",
        )),
        *(_VLLM + name for name in (
            "tensor_parallel_size", "data_parallel_size", "data_parallel_size_local", "data_parallel_rpc_port",
            "api_server_count", "all2all_backend", "enable_dbo", "enable_eplb", "enable_expert_parallel",
            "enable_return_routed_experts", "compilation_config", "worker_extension_cls", "worker_cls",
        )),
        "trainer.enable_router_replay", "inference.kv_cache_offload",
    )),
    Lock("engine", "folders, ports and processes belong to the harness", (
        "run", "clean", "dry_run", "slurm", "inference.dry_run", "inference.slurm", *_everywhere("output_dir"),
        "inference.server", "inference.router", "inference.backend_port", "orchestrator.env_server_base_port",
        "orchestrator.tasks_per_minute", "trainer.dist_timeout_seconds", "trainer.gc",
    )),
    Lock("engine", "the harness moves weights and rollouts", _everywhere("weight_broadcast", "rollout_transport")),
    Lock("engine", "every run starts from the base model", _everywhere("ckpt", "resume")),
    Lock("engine", "logs and metrics belong to the harness", (
        *_everywhere("log", "monitors", "heartbeat"), "trainer.metrics_server", "trainer.trace_path",
        "trainer.memory_profiler_path", "trainer.enable_token_export", "orchestrator.collect_inference_metrics",
        "orchestrator.inference_metrics_roles",
    )),
)  # fmt: skip

# prime-rl's second spelling of a shared key: one spelling, so that a change cannot hide in the other.
SHARED: Mapping[str, str] = {
    "trainer.max_steps": "max_steps",
    "orchestrator.max_steps": "max_steps",
    "trainer.model.seq_len": "seq_len",
    "orchestrator.seq_len": "seq_len",
}

# Names that people carry over from older prime-rl, TRL and others.
RENAMED: Mapping[str, str] = {
    "rollouts_per_example": "orchestrator.group_size",
    "num_generations": "orchestrator.group_size",
    "max_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "max_completion_length": "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.sampling.temperature": "orchestrator.train.sampling.temperature",
    "learning_rate": "trainer.optim.lr",
    "max_grad_norm": "trainer.optim.max_norm",
    "grad_clip": "trainer.optim.max_norm",
    "beta1": "trainer.optim.betas1",
    "beta2": "trainer.optim.betas2",
    "lr_scheduler_type": "trainer.scheduler.type",
    "max_concurrent": "orchestrator.concurrency.max_inflight",
}


def _matches(pattern: str, path: tuple[str, ...]) -> bool:
    segments = pattern.split(".")
    return len(segments) == len(path) and all(
        want == got or (want == ANY and _NAME.fullmatch(got) is not None)
        for want, got in zip(segments, path, strict=True)
    )


@lru_cache(maxsize=4096)  # asked for every key of every file, and the table is walked each time
def variants(path: tuple[str, ...]) -> tuple[Key, ...]:
    """Every open entry of a path; more than one where the default depends on the variant."""
    return tuple(key for key in KEYS if _matches(key.path, path))


def is_inner(path: tuple[str, ...]) -> bool:
    """True if open keys lie below this path."""
    return any(
        _matches(".".join(key.path.split(".")[: len(path)]), path) for key in KEYS if key.path.count(".") >= len(path)
    )


def lock(path: tuple[str, ...]) -> tuple[str, str] | None:
    """Owner and reason of a locked path, by its longest locked prefix."""
    for segment in path:
        if segment in LOCKED_ANYWHERE:
            return "rules", LOCKED_ANYWHERE[segment]
    for length in range(len(path), 0, -1):
        prefix = ".".join(path[:length]) if not any("." in segment for segment in path[:length]) else None
        for entry in LOCKS:
            if prefix in entry.prefixes:
                return entry.owner, entry.reason
    return None


def resolve(values: Mapping[str, Value]) -> dict[str, Value]:
    """Every open key that applies under `values`, with prime-rl's default where it is absent."""
    resolved: dict[str, Value] = {}
    for key in KEYS:
        for path in _instances(key, values):
            if applies(key, path, resolved):
                resolved[path] = values.get(path, key.default)
    return resolved


def _instances(key: Key, values: Mapping[str, Value]) -> Iterator[str]:
    if ANY not in key.path:
        yield key.path
        return
    depth = key.path.split(".").index(ANY) + 1
    stems = dict.fromkeys(".".join(path.split(".")[:depth]) for path in values)
    prefix = ".".join(key.path.split(".")[:depth])
    for stem in stems:
        if _matches(prefix, tuple(stem.split("."))):
            yield stem + key.path[len(prefix) :]


def applies(key: Key, path: str, resolved: Mapping[str, Value]) -> bool:
    """True if the variant is selected and every table around the key is switched on."""
    if key.only_if is not None and resolved.get(key.only_if[0]) not in key.only_if[1]:
        return False
    segments = path.split(".")
    for length in range(1, len(segments)):
        around = tuple(segments[:length])
        if any(_matches(switch, around) for switch in _SWITCHES) and resolved.get(".".join(around)) is None:
            return False
    return True


def default(path: str, resolved: Mapping[str, Value]) -> Value:
    """prime-rl's default of a key that applies under `resolved`. Raises KeyError for a closed key."""
    entries = variants(tuple(path.split(".")))
    for key in entries:
        if applies(key, path, resolved):
            return key.default
    if entries:
        return None
    raise KeyError(path)


def nearest(path: tuple[str, ...]) -> str | None:
    """The open key that an unknown one most likely means, also in another table."""
    wanted = ".".join(path)[-100:]
    leaf = wanted.rpartition(".")[2]
    for name in (wanted, leaf):
        if name in RENAMED:
            return RENAMED[name]
    known = list(dict.fromkeys(key.path for key in KEYS))

    def likeness(name: str) -> float:
        return difflib.SequenceMatcher(None, wanted, name).ratio()

    if same_leaf := [name for name in known if name.rpartition(".")[2] == leaf]:
        return max(same_leaf, key=likeness)
    if close := difflib.get_close_matches(wanted, known, n=1, cutoff=0.8):
        return close[0]
    leaves = {name.rpartition(".")[2] for name in known}
    if close := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75):
        return max((name for name in known if name.rpartition(".")[2] == close[0]), key=likeness)
    return None


def describe_keys(width: int = 120) -> str:
    """The allow-list as aligned text, grouped by TOML table, then what is locked and by whom."""
    lines: list[str] = []
    for table, keys in _TABLES.items():
        lines.append(f"\n[{table}]" if table else "top of train.toml")
        for key in keys:
            standard = {TABLE: "off" if key.default is None else "on", LIST: "all"}.get(key.kind)
            standard = standard or ("-" if key.default is None else value_text(key.default).strip('"'))
            condition = f" ({', '.join(map(str, key.only_if[1]))})" if key.only_if and key.only_if != _ROLLOUTS else ""
            head = f"  {key.leaf:<30} {key.allowed:<33} {standard:<8} "
            lines += textwrap.wrap(
                key.meaning + condition, width, initial_indent=head, subsequent_indent=" " * (len(head) + 1)
            )
    lines.append("\nlocked: an error to name them")
    everywhere = [Lock("rules", reason, (f"{name} (in any table)",)) for name, reason in LOCKED_ANYWHERE.items()]
    for entry in [*LOCKS, *everywhere]:
        lines.append(f"  {entry.owner}: {entry.reason}")
        lines += textwrap.wrap(", ".join(entry.prefixes), width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)

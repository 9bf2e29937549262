"""The allow-list: every key that train.toml may hold. Everything that is not in `KEYS` is refused.

Names, types, ranges and defaults are prime-rl's own (commit in pyproject.toml); a test holds each
entry against a recording of prime-rl's config classes. A range is tighter than prime-rl's only where
a comment says why. Who owns the other keys stands in `LOCKS`.
"""

import difflib
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby

from nightshift.config.values import Key, Kind, Value, value_text

SOURCE = "orchestrator.train.source"  # a list in prime-rl: its entries belong to the rules
CURRICULUM = f"{SOURCE}.curriculum"  # what is open in every entry
OPPONENT = "orchestrator.train.opponent"  # ours: of a game
RATIO = "orchestrator.train.ratio"  # ours: by the name of an environment, that of its entry


@dataclass(frozen=True, slots=True)
class Lock:
    """Keys that train.toml may not name: who owns them and why. `names` by table, with blanks between."""

    owner: str
    reason: str
    names: Mapping[str, str]

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Their dotted paths; what lies below is locked too."""
        pairs = ((table, name) for table, names in self.names.items() for name in names.split())
        return tuple(f"{table}.{name}" if table else name for table, name in pairs)


_MODEL, _VLLM = "trainer.model", "inference.vllm"
_ANYWHERE = "*"  # as a table: what is locked wherever it stands
_EVERYWHERE = ("", "trainer", "orchestrator", "inference")
LOCKS: tuple[Lock, ...] = (
    Lock("rules", "the model is fixed", {
        "": "model tokenizer", "trainer": "tokenizer", "orchestrator": "model tokenizer renderer",
        _MODEL: "name vlm debug impl conversion_dir index_cache quantization",
        _VLLM: "model dtype quantization chat_template rope_scaling tool_call_parser reasoning_parser "
        "hf_overrides tokenizer revision served_model_name load_format model_impl",
    }),
    Lock("rules", "the environment and its rewards are fixed", {SOURCE: "env serve name ratio", "trainer": "data"}),
    Lock("rules", "one setting for all sources: write it once, without source", {SOURCE: "sampling group_size algo"}),
    Lock("rules", "seeds are fixed", {f"{CURRICULUM}.sampler": "seed", _VLLM: "seed"}),
    Lock("rules", "the harness evaluates by itself", {"orchestrator": "eval"}),
    Lock("rules", "it changes what the server answers", {
        "inference": "enable_fp32_lm_head enable_fp32_router_logits use_deep_gemm",
        _VLLM: "max_model_len kv_cache_dtype generation_config override_generation_config logprobs_mode "
        "enable_prefix_caching speculative_config "
        "enable_lora max_loras max_cpu_loras max_lora_rank lora_target_modules",
    }),
    Lock("rules", "a log must hold no prompt", {_VLLM: "enable_log_requests enable_log_outputs"}),
    Lock("rules", "it needs a teacher, tools or several agents", {
        "orchestrator.algo": "sampling filter roles episode_agents teacher demo_key template renderer",
    }),
    Lock("rules", "it imports code", {"trainer.loss": "kwargs", _ANYWHERE: "import_path"}),
    Lock("rules", "vLLM cannot serve it, so another policy would be scored", {f"{_MODEL}.lora": "modules_to_save"}),
    Lock("rules", "it works only with prime-rl's own model classes", {f"{_MODEL}.ac": "mode targets"}),
    Lock("engine", "one GPU trains, one serves", {
        "": "deployment", "inference": "deployment use_pd_kv_transfer kv_cache_offload",
        "orchestrator": "num_train_workers pad_to_multiple_of", "trainer": "enable_router_replay",
        _MODEL: "attn cp cp_style dp_replicate ep ep_comm_backend deepep_num_sms deepep_token_chunk_size "
        "moe_fused_kernel moe_router_dtype moe_use_grouped_mm freeze_moe_router full_offload",
        _VLLM: "tensor_parallel_size data_parallel_size data_parallel_size_local data_parallel_rpc_port "
        "api_server_count all2all_backend enable_dbo enable_eplb enable_expert_parallel "
        "enable_return_routed_experts compilation_config worker_extension_cls worker_cls",
    }),
    Lock("engine", "folders, ports and processes belong to the harness", {
        "": "run clean dry_run slurm output_dir", "trainer": "output_dir dist_timeout_seconds gc",
        "orchestrator": "output_dir env_server_base_port tasks_per_minute",
        "inference": "output_dir dry_run slurm server router backend_port",
    }),
    Lock("engine", "the harness moves weights and rollouts",
         dict.fromkeys(_EVERYWHERE, "weight_broadcast rollout_transport")),
    Lock("engine", "every run starts from the base model", dict.fromkeys(_EVERYWHERE, "ckpt resume")),
    Lock("engine", "logs and metrics belong to the harness", dict.fromkeys(_EVERYWHERE, "log monitors heartbeat")),
    Lock("engine", "logs and metrics belong to the harness", {
        "trainer": "metrics_server trace_path memory_profiler_path enable_token_export",
        "orchestrator": "collect_inference_metrics inference_metrics_roles",
    }),
    Lock("rules", "they can redirect imports and downloads", {_ANYWHERE: "env_vars"}),
    Lock("rules", "it can change what the server does", {_ANYWHERE: "extra_body"}),
    Lock("rules", "it runs foreign code", {_ANYWHERE: "trust_remote_code"}),
)  # fmt: skip

# prime-rl's second spelling of a shared key: one spelling, so that a change cannot hide in the other.
SHARED: Mapping[str, str] = {
    "trainer.max_steps": "max_steps",
    "orchestrator.max_steps": "max_steps",
    "trainer.model.seq_len": "seq_len",
    "orchestrator.seq_len": "seq_len",
}


def lock(path: tuple[str, ...]) -> Lock | None:
    """The lock on a path: that of a segment locked anywhere, else that of its longest locked prefix."""
    by_prefix = {prefix: entry for entry in LOCKS for prefix in entry.prefixes}
    anywhere = (f"{_ANYWHERE}.{segment}" for segment in path)
    prefixes = (".".join(path[:length]) for length in range(len(path), 0, -1))
    return next((by_prefix[name] for name in (*anywhere, *prefixes) if name in by_prefix), None)


INT, FLOAT, BOOL, CHOICE, LIST, TABLE = Kind.INT, Kind.FLOAT, Kind.BOOL, Kind.CHOICE, Kind.LIST, Kind.TABLE

ANY = "*"  # one path segment that the agent names
_POOLS, _GATES = f"{CURRICULUM}.sampler.pools", f"{CURRICULUM}.gates"
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
_BY_DIFFICULTY = (f"{CURRICULUM}.sampler.type", ("difficulty_pool",))
_POLICY = (f"{OPPONENT}.type", ("self", "previous"))
_PREVIOUS = (f"{OPPONENT}.type", ("previous",))
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
        Key("initial_inflight", INT, None, "in flight at the start; max_inflight at most", 1, 65_536, nullable=True),
        Key("min_inflight", INT, 1, "fewest rollouts in flight", 1, 65_536),
        # prime-rl's 1024, or no bound at all, let rollouts grow older until all are as old as max_off_policy_steps.
        Key("max_inflight", INT, None, "most rollouts in flight; unset: two batches", 1, 65_536),
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
    RATIO: (
        # prime-rl writes it into each entry of its list of sources, which belongs to the rules.
        Key(ANY, FLOAT, 1.0, "an environment's share of the training examples", above=0, maximum=1e6),
    ),
    OPPONENT: (
        Key("type", CHOICE, "self", "plays a game's other seat", choices=("self", "previous", "pool")),
        Key("temperature", FLOAT, 1.0, "of the other seat, if a policy plays it", 0.01, 2.0, only_if=_POLICY),
        Key("interval", INT, 10, "steps until previous is the policy of now", 1, 1000, only_if=_PREVIOUS),
    ),
    "orchestrator.algo": (
        # The others need a teacher, tools or several agents.
        Key("type", CHOICE, "grpo", "how rewards become advantages", choices=("grpo", "max_rl", "rae")),
        Key("decay", FLOAT, 0.95, "of the reward baseline", 0, below=1, only_if=_RAE),
        Key("length_penalty", TABLE, None, "take a length penalty off each reward", nullable=True, only_if=_GRPO),
    ),
    "orchestrator.algo.length_penalty": (
        Key("type", CHOICE, "linear", "shape of the penalty", choices=("linear",)),
        Key("num_output_tokens_weight", FLOAT, 0.25, "weight of generated tokens", 0),
        Key("num_input_tokens_weight", FLOAT, 0.1, "weight of prompt tokens", 0),
        Key("num_turns_weight", FLOAT, 0.1, "weight of turns", 0),
    ),
    f"{CURRICULUM}.sampler": (
        Key("type", CHOICE, "standard", "examples in order, or by difficulty", choices=("standard", "difficulty_pool")),
    ),
    _POOLS: (
        Key(ANY, TABLE, None, "any name; replaces hard, normal and easy", only_if=_BY_DIFFICULTY),
    ),
    f"{_POOLS}.{ANY}": (
        # Rewards are 0 to 1 here: a threshold outside sorts nothing.
        Key("threshold", FLOAT, None, "required; highest mean reward in the pool", 0, 1),
        Key("weight", FLOAT, None, "required; relative chance of its examples", 0),
    ),
    _GATES: (
        Key(ANY, TABLE, None, "any name; only groups that pass it train"),
    ),
    f"{_GATES}.{ANY}": (
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
        # "custom" imports code.
        Key("type", CHOICE, "default", "policy loss", choices=("default", "ipo")),
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
        Key("compile", TABLE, {}, "torch.compile the model", nullable=True),
        Key("ac", TABLE, {}, "recompute activations: less memory, slower", nullable=True),
        Key("ac_offloading", TABLE, {}, "activations in CPU memory: slower", nullable=True),
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
        Key("target_modules", LIST, tuple(sorted(_LINEARS)), "layers with an adapter, of " + " ".join(_LINEARS),
            choices=_LINEARS),
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

# Where train.toml is silent, the memory of the cards decides (engines/prime_rl/config.py), not prime-rl's default.
# So writing one down is a change.
BY_PRESET = frozenset(f"trainer.model.{name}" for name in ("ac", "ac_offloading", "optim_cpu_offload"))
KEYS: tuple[Key, ...] = tuple(replace(key, table=table) for table, keys in _TABLES.items() for key in keys)
_ENTRIES: dict[str, tuple[Key, ...]] = {path: tuple(same) for path, same in groupby(KEYS, lambda key: key.path)}
_PARTS = tuple((key, key.path.partition(f".{ANY}")) for key in KEYS)
_INNER = frozenset(prefix for table in _TABLES for prefix in accumulate(table.split("."), "{}.{}".format))
_SWITCHES = frozenset(key.path for key in KEYS if key.kind is TABLE)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_NAMED = re.compile(rf"\A({'|'.join(map(re.escape, (_POOLS, _GATES, RATIO)))})\.[^.]+")


def is_name(segment: str) -> bool:
    """True for what a segment of an open path can look like; the agent names pools and gates in this form too."""
    return _NAME.fullmatch(segment) is not None


def _pattern(path: str) -> str:
    """The path with ANY for the name that the agent gave to a pool or gate."""
    return _NAMED.sub(rf"\1.{ANY}", path)


@lru_cache(4096)
def variants(path: str) -> tuple[Key, ...]:
    """Every open entry of a path; more than one where the default depends on the variant."""
    return _ENTRIES.get(_pattern(path), ())


@lru_cache(4096)
def is_inner(path: str) -> bool:
    """True if open keys lie below this path."""
    return _pattern(path) in _INNER


def resolve(values: Mapping[str, Value]) -> dict[str, Value]:
    """Every open key that applies under `values`, with prime-rl's default where it is absent.

    Below a pool or gate one for each of them in `values`.
    """
    resolved: dict[str, Value] = {}
    for key, (stem, is_named, rest) in _PARTS:
        paths: Iterable[str] = (stem,)
        if is_named:
            below = (path.removeprefix(f"{stem}.") for path in values if path.startswith(f"{stem}."))
            paths = dict.fromkeys(f"{stem}.{path.partition('.')[0]}{rest}" for path in below)
        for path in paths:
            if applies(key, path, resolved):
                resolved[path] = values.get(path, key.default)
    return resolved


def applies(key: Key, path: str, resolved: Mapping[str, Value]) -> bool:
    """True if the variant is selected and every table around the key is switched on."""
    if key.only_if is not None and resolved.get(key.only_if[0]) not in key.only_if[1]:
        return False
    return None not in map(resolved.get, _switches_around(path))


@lru_cache(4096)
def _switches_around(path: str) -> tuple[str, ...]:
    tables = accumulate(path.split(".")[:-1], "{}.{}".format)
    return tuple(table for table in tables if _pattern(table) in _SWITCHES)


def default(path: str, resolved: Mapping[str, Value]) -> Value:
    """prime-rl's default of a key under `resolved`, None where it does not apply. KeyError for a closed key."""
    if not (entries := variants(path)):
        raise KeyError(path)
    return next((key.default for key in entries if applies(key, path, resolved)), None)


def nearest(wanted: str) -> str | None:
    """The open key that an unknown one most likely means, also in another table."""
    wanted = wanted[-100:]
    leaf = wanted.rpartition(".")[2]
    leaves = {path.rpartition(".")[2] for path in _ENTRIES}
    if leaf not in leaves:
        for path in difflib.get_close_matches(wanted, list(_ENTRIES), n=1, cutoff=0.8):
            return path
        leaf = next(iter(difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.75)), "")
    same_leaf = (path for path in _ENTRIES if path.rpartition(".")[2] == leaf)
    return max(same_leaf, key=lambda path: difflib.SequenceMatcher(None, wanted, path).ratio(), default=None)


def describe_keys(unused: Collection[str] = (), width: int = 120) -> str:
    """The allow-list as aligned text, grouped by TOML table, then what is locked and by whom.

    The paths in `unused` are marked with a minus.
    """
    lines: list[str] = []
    for table, keys in _TABLES.items():
        lines.append(f"\n[{table}]" if table else "top of train.toml")
        for key in keys:
            standard = "-" if key.default is None else value_text(key.default).strip('"')
            standard = {TABLE: "off" if key.default is None else "on", LIST: "all"}.get(key.kind, standard)
            path = replace(key, table=table).path
            standard = "preset" if path in BY_PRESET else standard
            condition = f" ({', '.join(map(str, key.only_if[1]))})" if key.only_if and key.only_if != _ROLLOUTS else ""
            mark = "-" if path in unused else " "
            head = f"{mark} {key.leaf:<30} {key.allowed:<33} {standard:<8} "
            lines += textwrap.wrap(
                key.meaning + condition, width, initial_indent=head, subsequent_indent=" " * (len(head) + 1)
            )
    lines.append("\nlocked: an error to name them (*: in any table)")
    for entry in LOCKS:
        lines.append(f"  {entry.owner}: {entry.reason}")
        lines += textwrap.wrap(", ".join(entry.prefixes), width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)

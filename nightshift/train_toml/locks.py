"""The keys that train.toml may not hold: who owns them, and why. What is open stands in keys.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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

"""What of train.toml depends on the memory of the cards: defaults of keys that it leaves out, caps on those it sets.

Computed, not measured: benchmarks/gpu_memory.py has the sums, docs/gpus.md the table, and a test compares the three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nightshift.engines.memory import above_cap, line_in
from nightshift.rules import NO_CARD
from nightshift.train_toml.config import Config
from nightshift.train_toml.keys import resolve
from nightshift.train_toml.values import Value, value_text

AC, AC_OFFLOADING, OFFLOAD = (f"trainer.model.{name}" for name in ("ac", "ac_offloading", "optim_cpu_offload"))
CHUNK, ROW = "trainer.model.fused_lm_head_token_chunk_size", "seq_len"
SHARE, SEQUENCES, TOKENS = (
    f"inference.vllm.{name}" for name in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")
)
# For models below 1B: prime-rl's own defaults save memory that is not short on a large card.
_FAST: Mapping[str, Value] = {OFFLOAD: False, AC: None, AC_OFFLOADING: None, SHARE: 0.9}
_SERVED_48: Mapping[str, Value] = {CHUNK: 8192, SEQUENCES: 2048, TOKENS: 65_536}
_SERVED_24: Mapping[str, Value] = {CHUNK: 8192, SEQUENCES: 512, TOKENS: 16_384}


@dataclass(frozen=True, slots=True)
class Preset:
    """`kept_row`: the longest seq_len whose activations are kept (ac is off). `caps`: the most that train.toml may
    write for a key; of a switch, all that it may. `defaults`: where they are not the fast ones."""

    kept_row: int = 32_768
    caps: Mapping[str, Value] = field(default_factory=dict)
    defaults: Mapping[str, Value] = field(default_factory=dict)


# By Rules.memory. On one card the server takes its share first, and the trainer what is left.
PRESETS: Mapping[str, Preset] = {
    NO_CARD: Preset(),
    "2 x 80 GB": Preset(),
    "2 x 48 GB": Preset(16_384, _SERVED_48),
    "2 x 24 GB": Preset(4096, {**_SERVED_24, SHARE: 0.9}),
    "2 x 16 GB": Preset(2048, {**_SERVED_24, SHARE: 0.9, ROW: 16_384}, {AC: {}}),
    "1 x 80 GB": Preset(16_384, {SHARE: 0.4}, {SHARE: 0.4}),
    "1 x 48 GB": Preset(8192, {**_SERVED_48, SHARE: 0.4}, {SHARE: 0.4}),
    "1 x 24 GB": Preset(2048, {**_SERVED_24, SHARE: 0.35, ROW: 16_384}, {SHARE: 0.35, AC: {}}),
    "1 x 16 GB": Preset(
        1024, {**_SERVED_24, SHARE: 0.4, ROW: 4096, OFFLOAD: True}, {SHARE: 0.4, AC: {}, OFFLOAD: True}
    ),
}


def with_preset(config: Config, memory: str) -> dict[str, Value]:
    """Every open key that applies to a checked train.toml, what it leaves out by the preset, else by prime-rl.

    ConfigError for a value of the file above the preset's cap.
    """
    preset = PRESETS[memory]
    silent = {**_FAST, **preset.defaults}
    if config.values.get(AC_OFFLOADING) is not None:
        del silent[AC]  # it would switch it on, whatever is said here
    if config.values.get("trainer.model.fsdp_cpu_offload"):
        silent[OFFLOAD] = False  # prime-rl refuses the two together: that one has all on the CPU
    values = resolve({**silent, **config.values})
    for path, cap in preset.caps.items():
        if _exceeds(values[path], cap) and line_in(config, path):
            most = value_text(cap) if isinstance(cap, bool) else f"{value_text(cap)} or less"
            raise above_cap(config, memory, path, most, f"Write {path.rpartition('.')[2]} = {most}")
    if values[AC] is None and _exceeds(values[ROW], preset.kept_row):
        most, path = f"{preset.kept_row} or less", ROW if line_in(config, ROW) else AC
        fix = f"Write seq_len = {most}, or a table [{AC}] instead"
        raise above_cap(config, memory, path, f"a seq_len of {most} without recomputed activations", fix)
    return values


def _exceeds(value: Value, cap: Value) -> bool:
    if isinstance(cap, bool) or not isinstance(value, int | float):
        return value is not None and value is not cap  # None: vLLM's own choice; a text: no chunks at all
    return isinstance(cap, int | float) and value > cap

"""Presets of memory: which one a machine gets, what it gives and forbids, and that all it allows fits by the sums."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu_memory import GB, PARAMETERS, Tokens, server_gb, trainer_gb, trl_gb
from nightshift.config.rules import NO_CARD
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import parse
from nightshift.engines.base import open_engine
from nightshift.engines.memory import on_cards
from nightshift.engines.prime_rl.config import AC, CHUNK, OFFLOAD, PRESETS, ROW, SEQUENCES, SHARE, TOKENS, with_preset
from nightshift.engines.trl.engine import MEMORY, TOO_SMALL_FOR_TWO
from nightshift.errors import ConfigError, UsageError
from tests.prime_rl_plans import SHIPPED
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, GSM8K_TRL
from tests.unit.test_gpus import CARDS, StandInNvml

ROOT = Path(__file__).parents[2]
CARDS_ONLY = [name for name in PRESETS if name != NO_CARD]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "rules.toml").write_text("")
    return tmp_path


def there(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml([replace(CARDS[name]) for name in names]))


@pytest.mark.parametrize(
    ("names", "rules", "gpus", "memory"),
    [
        (["RTX 4090", "RTX 4090"], GSM8K_PRIME_RL, None, "2 x 24 GB"),
        (["A100 40", "A100 40"], GSM8K_PRIME_RL, None, "2 x 24 GB"),  # the next smaller
        (["H100", "H100"], GSM8K_PRIME_RL, "1,0", "2 x 80 GB"),
        (["L40S", "A6000"], GSM8K_PRIME_RL, None, "2 x 48 GB"),
        (["H100", "A6000", "RTX 4090"], GSM8K_PRIME_RL, "0,2", "2 x 24 GB"),  # the smaller one
        (["H100"], GSM8K_PRIME_RL, "0,0", "1 x 80 GB"),
        (["H100"], GSM8K_PRIME_RL, None, NO_CARD),  # there are no two: the check says so
        (["RTX 3060", "RTX 3060"], GSM8K_PRIME_RL, None, NO_CARD),  # too small: the check says so
        (["H100", "H100"], GSM8K_PRIME_RL, "none", NO_CARD),
        (["H100"], GSM8K_TRL, None, "1 x 80 GB"),
        (["H100"], ARITHMETIC_TRL, None, NO_CARD),
        (["H100"], ARITHMETIC_TRL, "0", NO_CARD),  # the tiny model fits anywhere
        ([], GSM8K_PRIME_RL, None, NO_CARD),
    ],
)
def test_the_preset_is_that_of_the_smallest_card_in_use(monkeypatch, root, names, rules, gpus, memory):
    there(monkeypatch, *names)
    found = on_cards(rules, root, {}, gpus)
    assert found.memory == memory
    assert (found.hash(root) == rules.hash(root)) is (memory == NO_CARD)  # another campaign


@pytest.mark.parametrize(
    ("names", "wanted", "gpus", "expected"),
    [
        (["H100", "H100"], 24, None, "2 x 24 GB"),
        (["H100"], 48, "0,0", "1 x 48 GB"),
        ([], 24, None, "2 x 24 GB"),  # for a dry run
        (["RTX 4090", "H100"], 80, None, r"memory_gb = 80 does not fit on GPU 0 \(.*4090\)\. Write memory_gb = 24"),
        (["RTX 3060"], 16, "0,0", r"does not fit on GPU 0 \(.*3060\)"),
        ([], 17, None, "rules.toml: .*17.*memory_gb = 0, 16, 24, 48 or 80"),
    ],
)
def test_rules_toml_names_a_smaller_one(monkeypatch, root, names, wanted, gpus, expected):
    there(monkeypatch, *names)
    (root / "rules.toml").write_text(f"memory_gb = {wanted}\n")
    if expected in PRESETS:
        assert on_cards(GSM8K_PRIME_RL, root, {}, gpus).memory == expected
    else:
        with pytest.raises(UsageError, match=expected):
            on_cards(GSM8K_PRIME_RL, root, {}, gpus)


def test_what_the_file_writes_wins_over_the_preset_up_to_its_cap() -> None:
    values = with_preset(parse(SHIPPED), "1 x 16 GB")
    assert (values[AC], values[OFFLOAD], values[SHARE]) == ({}, True, 0.4)
    assert values["trainer.model.ac.freq"] == 1
    written = b"[inference.vllm]\ngpu_memory_utilization = 0.3\n[trainer.model.ac]\nfreq = 2\n"
    values = with_preset(parse(SHIPPED + written), "2 x 80 GB")
    assert (values[AC], values["trainer.model.ac.freq"], values[SHARE]) == ({}, 2, 0.3)
    offloading = with_preset(parse(SHIPPED + b"[trainer.model.ac_offloading]\n"), "2 x 80 GB")
    assert (offloading[AC], offloading["trainer.model.ac_offloading"]) == ({}, {})  # as prime-rl would take it
    assert with_preset(parse(SHIPPED + b"[trainer.model]\nfsdp_cpu_offload = true\n"), "1 x 16 GB")[OFFLOAD] is False


@pytest.mark.parametrize(
    ("memory", "written", "words"),
    [
        ("2 x 24 GB", "[inference.vllm]\nmax_num_seqs = 513", "max_num_seqs = 513: .* 2 x 24 GB allows 512 or less"),
        ("1 x 48 GB", "[inference.vllm]\ngpu_memory_utilization = 0.41", "= 0.41: .* allows 0.4 or less"),
        ("2 x 16 GB", '[trainer.model]\nfused_lm_head_token_chunk_size = "disabled"', '"disabled": .* allows 8192'),
        ("1 x 16 GB", "[trainer.model]\noptim_cpu_offload = false", "= false: .* allows true. Write .* = true$"),
        ("2 x 16 GB", "[inference.vllm]\nmax_num_batched_tokens = 20000", "= 20000: .*allows 16384 or less"),
        # However a hostile file spells it.
        ("2 x 24 GB", '["inference"]\n"vllm" . max_num_seqs = 5_13', "max_num_seqs = 513: .* allows 512"),
        ("2 x 24 GB", "[inference]\nvllm = {max_num_seqs = 0x201}", "max_num_seqs = 513: .* allows 512"),
    ],
)
def test_more_than_fits_is_refused_with_line_preset_and_cap(memory: str, written: str, words: str) -> None:
    config = parse(SHIPPED + b"\n" + written.encode())
    line = len((SHIPPED + b"\n" + written.encode()).decode().rstrip("\n").split("\n"))
    with pytest.raises(ConfigError, match=f"^train.toml:{line}: .*{words}"):
        with_preset(config, memory)
    with_preset(config, "2 x 80 GB")


def test_a_long_row_needs_recomputed_activations_on_a_small_card() -> None:
    long = SHIPPED.replace(b"seq_len = 2048 ", b"seq_len = 8192 ")
    with pytest.raises(
        ConfigError, match=r"train.toml:7: seq_len = 8192: .* 4096 or less without.*\[trainer.model.ac\]"
    ):
        with_preset(parse(long), "2 x 24 GB")
    assert with_preset(parse(long + b"[trainer.model.ac]\n"), "2 x 24 GB")[ROW] == 8192
    without_row = parse(b'[orchestrator]\ngroup_size = 4\n[trainer.model]\nac = "None"\n')
    with pytest.raises(ConfigError, match=r'train.toml:4: trainer.model.ac = "None": .* a seq_len of 1024 or less'):
        with_preset(without_row, "1 x 16 GB")


def test_completions_that_do_not_fit_beside_trl_are_refused() -> None:
    long = parse(SHIPPED.replace(b"max_completion_tokens = 512 ", b"max_completion_tokens = 1025 "))
    with pytest.raises(ConfigError, match=r"train.toml:\d+: .*= 1025: .* 1 x 24 GB allows 1024 or less"):
        open_engine(replace(GSM8K_TRL, memory="1 x 24 GB"), ROOT, {}).validate(long)
    open_engine(replace(GSM8K_TRL, memory="1 x 80 GB"), ROOT, {}).validate(long)


@pytest.mark.parametrize("memory", CARDS_ONLY)
def test_all_that_a_preset_allows_fits_on_its_card(memory: str) -> None:
    """The file as shipped, and every corner of what the caps leave, by the sums of benchmarks/gpu_memory.py."""
    num_cards, card_gb = (int(word) for word in (memory.split()[0], memory.split()[2]))
    preset = PRESETS[memory]
    corners = [with_preset(parse(SHIPPED), memory)]
    most_chunk = int(preset.caps.get(CHUNK, 32_768))
    for is_recomputed, chunk in itertools.product((False, True), (8192, most_chunk)):
        row = int(preset.caps.get(ROW, 32_768)) if is_recomputed else preset.kept_row
        corners.append({**corners[0], AC: {} if is_recomputed else None, ROW: row, CHUNK: chunk})
    share = float(preset.caps.get(SHARE, 0.95))
    for values in corners:
        used = sum(trainer_gb(values).values()) + (share * card_gb if num_cards == 1 else 0)
        assert used <= 0.93 * card_gb, (memory, values[ROW], values[AC])
    tokens = Tokens(int(preset.caps.get(SEQUENCES, 2048)), int(preset.caps.get(TOKENS, 65_536)))
    assert server_gb(corners[0][SHARE], card_gb, tokens)["KV cache"] > 0


@pytest.mark.parametrize("memory", [name for name in MEMORY if name != NO_CARD])
def test_all_that_trl_may_sample_and_train_fits(memory: str) -> None:
    longest, card_gb = MEMORY[memory][2], int(memory.split()[2])
    for sampled in (512, min(longest, 1024)):  # on 80 GB longer ones are allowed as ever, and may not fit
        most = max(trl_gb(memory, sampled).values())
        assert most <= 0.93 * card_gb
    assert (most + 4 * PARAMETERS / GB <= 0.93 * card_gb) is (memory != TOO_SMALL_FOR_TWO), "with an earlier policy"


def test_an_earlier_policy_as_opponent_is_refused_where_it_has_no_room() -> None:
    rules = rules_of(ROOT, Chosen(environments=["tictactoe"], model="Qwen/Qwen2.5-0.5B-Instruct"), "trl", 1)
    config = parse(SHIPPED + b'\n[orchestrator.train.opponent]\ntype = "previous"\n')
    roomy, small = (open_engine(replace(rules, memory=name), ROOT, {}) for name in ("1 x 24 GB", TOO_SMALL_FOR_TWO))
    assert roomy.validate(config).settings["opponent"]["type"] == "previous"
    with pytest.raises(ConfigError, match=r'type = "previous": .* 1 x 16 GB allows no second model'):
        small.validate(config)

"""The defaults of the smallest GPU in use: which size a machine gets, and what train.toml overwrites."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.config.rules import NO_CARD
from nightshift.config.train_toml import parse
from nightshift.engines.base import on_cards, open_engine
from nightshift.engines.prime_rl.config import AC, OFFLOAD, SHARE, with_defaults
from tests.prime_rl_plans import SHIPPED
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, GSM8K_TRL
from tests.unit.test_gpus import CARDS, StandInNvml

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("names", "rules", "gpus", "memory_gb", "memory"),
    [
        (["H100", "H100"], GSM8K_PRIME_RL, "1,0", 0, "2 x 80 GB"),
        (["H100", "A6000", "RTX 4090"], GSM8K_PRIME_RL, "0,2", 0, "2 x 24 GB"),  # the smaller one
        (["H100"], GSM8K_PRIME_RL, "0,0", 0, "1 x 80 GB"),
        (["H100"], GSM8K_PRIME_RL, None, 0, NO_CARD),  # there are no two: the check reports it
        (["RTX 3060", "RTX 3060"], GSM8K_PRIME_RL, None, 0, "2 x 16 GB"),  # smaller than every row: the least
        (["H100"], GSM8K_TRL, None, 0, "1 x 80 GB"),
        (["H100"], ARITHMETIC_TRL, "0", 0, NO_CARD),  # the tiny model fits anywhere
        (["H100"], GSM8K_PRIME_RL, "0,0", 48, "1 x 48 GB"),  # rules.toml names a size
        ([], GSM8K_PRIME_RL, None, 24, "2 x 24 GB"),  # for a dry run, or on a login node
    ],
)
def test_the_smallest_card_in_use_or_rules_toml_chooses(monkeypatch, tmp_path, names, rules, gpus, memory_gb, memory):
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml([replace(CARDS[name]) for name in names]))
    (tmp_path / "rules.toml").write_text(f"memory_gb = {memory_gb}\n")
    chosen = on_cards(rules, tmp_path, {}, gpus)
    assert chosen.memory == memory
    assert (chosen.hash(tmp_path) == rules.hash(tmp_path)) is (memory == NO_CARD)  # another campaign


def test_what_the_file_writes_wins_over_the_default() -> None:
    values = with_defaults(parse(SHIPPED), "1 x 16 GB")
    assert (values[AC], values[OFFLOAD], values[SHARE]) == ({}, True, 0.4)
    written = b"[inference.vllm]\ngpu_memory_utilization = 0.95\n[trainer.model]\noptim_cpu_offload = false\n"
    values = with_defaults(parse(SHIPPED + written), "1 x 16 GB")
    assert (values[AC], values[OFFLOAD], values[SHARE]) == ({}, False, 0.95)
    offloading = with_defaults(parse(SHIPPED + b"[trainer.model.ac_offloading]\n"), "2 x 80 GB")
    assert (offloading[AC], offloading["trainer.model.ac_offloading"]) == ({}, {})  # as prime-rl would take it
    assert with_defaults(parse(SHIPPED + b"[trainer.model]\nfsdp_cpu_offload = true\n"), "1 x 16 GB")[OFFLOAD] is False


def test_trl_takes_fewer_rollouts_at_once_on_a_smaller_card(tmp_path: Path) -> None:
    config = parse(SHIPPED)
    sizes = []
    for memory in (NO_CARD, "1 x 80 GB", "1 x 16 GB"):
        engine = open_engine(replace(GSM8K_TRL, memory=memory), ROOT, {})
        spec = engine.spec(engine.validate(config).settings, 1, tmp_path)  # type: ignore[attr-defined]
        sizes.append((spec["trained_at_once"], spec["sampled_at_once"]))
    assert sizes == [(512, 512), (16, 512), (1, 32)]

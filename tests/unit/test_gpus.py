"""GPUs as NVML tells of them, with a stand-in for NVML, and the defaults of the smallest one: no GPU is needed."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nightshift.config.rules import NO_CARD
from nightshift.config.rules_toml import Chosen, rules_of
from nightshift.config.train_toml import parse
from nightshift.engines.base import on_cards, open_engine
from nightshift.engines.prime_rl.config import AC, OFFLOAD, SHARE, with_defaults
from nightshift.errors import EngineError, UsageError
from nightshift.executors.gpus import (
    Gpu,
    PeakMemory,
    choose_gpus,
    list_gpus,
    num_gpus,
    nvml_session,
    parse_gpus,
    visible_gpus,
)
from tests.prime_rl_plans import SHIPPED
from tests.rules import ARITHMETIC_TRL, GSM8K_PRIME_RL, GSM8K_TRL, ROOT
from tests.stand_in_nvml import Card, StandInNvml

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-aa00", 85.0, 84.5, "570.86.15", (9, 0))
ONE_TO_THREE = rules_of(ROOT, Chosen(environments=["gsm8k"], train_gpus=3), None, 8)
MACHINE = [replace(H100, index=i, uuid=f"GPU-aa{i}0-1234") for i in range(4)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> StandInNvml:
    """A machine with cards that a test chooses."""
    nvml = StandInNvml([])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


# Total memory in GB, as drivers of the 570 series report it.
CARDS = {"RTX 4090": 25.8, "H100": 85.5, "A6000": 51.5, "RTX 3060": 12.9}


def test_a_machine_without_a_driver_has_no_gpus_and_a_failing_one_is_one_line(nvml: StandInNvml) -> None:
    nvml.cards.append(Card(lost=True))
    with pytest.raises(EngineError, match=r"NVML cannot read the GPUs: GPU is lost. Run nvidia-smi"):
        list_gpus()
    nvml.driver = None
    assert (list_gpus(), num_gpus({}), nvml.num_open) == ([], 0, 0)


def test_gpus_are_read_as_they_are_and_nvml_is_closed(nvml: StandInNvml) -> None:
    nvml.cards.extend([Card(), Card("NVIDIA GB10", (12, 1), total_gb=None)])
    first, second = list_gpus()
    assert (first.index, first.name, first.memory_gb, first.free_gb) == (0, "NVIDIA H100 80GB HBM3", 80.0, 79.5)
    assert (first.driver, first.compute_capability) == ("570.86.15", (9, 0))
    assert (second.memory_gb, second.free_gb) == (None, None)  # not told is not 0
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("text", "split", "ids"),
    [
        (" 3, 2 ", (1, 1), (3, 2)),
        ("1,1", (1, 1), (1, 1)),
        ("None", (1, 1), ()),
        (" 7 ", (1,), (7,)),
        ("3:0-2", (1, 3), (3, 0, 1, 2)),
        ("0,1:2-7", (2, 6), (0, 1, 2, 3, 4, 5, 6, 7)),
        *((text, (1, 1), None) for text in ("", "0", "0,1,2", "a,b", "-1,0", "0,99999999999")),
        *((text, (1, 3), None) for text in ("0,1", "0:1,2", "0,1:2,3", "0:0-2", "0:1:2,3", "0:3-1", "0:")),
    ],
)
def test_gpus_flag_names_as_many_as_the_rules_say(text, split, ids):
    if ids is None:
        with pytest.raises(UsageError, match=rf"--gpus {re.escape(repr(text))} does not name {split[0]} \+ {split[1]}"):
            parse_gpus(text, split)
    else:
        assert parse_gpus(text, split) == ids


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("2,0", [2, 0]),
        ("GPU-aa30", [3]),
        ("GPU-aa30-1234,1", [3, 1]),
        ("0,-1,1", [0]),
        ("", []),
        *((text, None) for text in ("01", "MIG-1234", "0,0", "7", "GPU-aa", "GPU-ffff", "0,,1")),
    ],
)
def test_visible_devices_by_number_and_uuid_are_whole_gpus_of_their_own(visible, indices):
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    if indices is None:
        with pytest.raises(EngineError, match=r"CUDA_VISIBLE_DEVICES contains .* not one whole GPU.* List whole"):
            visible_gpus(MACHINE, environ)
    else:
        assert [gpu.index for gpu in visible_gpus(MACHINE, environ)] == indices


@pytest.mark.parametrize(
    ("machine", "ids", "num", "visible", "expected"),
    [
        (MACHINE, None, 2, None, [0, 1]),
        (MACHINE, None, 1, "3,1", [3]),
        (MACHINE, (3, 2), 2, None, [3, 2]),
        (MACHINE, (2, 2), 2, "2", [2, 2]),
        (MACHINE, None, 2, "1", "needs 2 NVIDIA GPUs, .* has 4, 1 visible.*Run with --engine trl, with --gpus 0,0"),
        (MACHINE, (0, 9), 2, None, "GPU 9 does not exist, or .* Choose from: 0, 1, 2, 3"),
        (MACHINE, (0, 2), 2, "0,1", "GPU 2 .*, or CUDA_VISIBLE_DEVICES hides it. Choose from: 0, 1"),
        (MACHINE, (3, 0, 1, 2), 4, None, [3, 0, 1, 2]),
    ],
)
def test_the_gpus_are_those_named_or_the_first_that_are_visible(machine, ids, num, visible, expected):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if isinstance(expected, str):
        with pytest.raises(EngineError, match=expected):
            choose_gpus(machine, ids, num, environ)
    else:
        assert [gpu.index for gpu in choose_gpus(machine, ids, num, environ)] == expected


def test_peak_memory_is_the_largest_sample_of_one_gpu(nvml: StandInNvml) -> None:
    nvml.cards.extend([Card(used_gb=1.0), Card(used_gb=2.0)])
    with nvml_session() as session:
        memory = PeakMemory((0, 1), session)
        assert memory.peak_gb is None  # not sampled yet
        memory.sample()
        nvml.cards[0].used_gb = 30.0
        memory.sample()
        nvml.cards[0].used_gb = 5.0
        nvml.cards[1].lost = True
        memory.sample()
    assert memory.peak_gb == 30.0
    assert nvml.num_open == 0
    nvml.cards[:] = [Card(total_gb=None)]
    with nvml_session() as session:
        memory = PeakMemory((0,), session)
        memory.sample()
    assert memory.peak_gb is None


def test_the_real_nvml_has_every_function_that_is_called() -> None:
    import pynvml

    names = [name for name in vars(StandInNvml) if name.startswith("nvml")]
    assert [name for name in (*names, "NVMLError") if not hasattr(pynvml, name)] == []


@pytest.mark.parametrize(
    ("names", "rules", "gpus", "memory_gb", "memory"),
    [
        (["H100", "H100"], GSM8K_PRIME_RL, "1,0", 0, "2 x 80 GB"),
        (["H100", "A6000", "RTX 4090"], GSM8K_PRIME_RL, "0,2", 0, "2 x 24 GB"),  # the smaller one
        (["RTX 3060", "RTX 3060"], GSM8K_PRIME_RL, None, 0, "2 x 16 GB"),  # smaller than every row: the least
        (["H100"], GSM8K_TRL, None, 0, "1 x 80 GB"),
        (["H100", "H100", "A6000", "H100"], ONE_TO_THREE, None, 0, "4 x 48 GB"),
        (["H100", "H100"], ONE_TO_THREE, None, 0, NO_CARD),  # there are no four: the check reports it
        (["H100"], ARITHMETIC_TRL, "0", 0, NO_CARD),  # the tiny model fits anywhere
        (["H100"], GSM8K_PRIME_RL, "0,0", 48, "1 x 48 GB"),  # rules.toml names a size
        ([], GSM8K_PRIME_RL, None, 24, "2 x 24 GB"),  # for a dry run, or on a login node
    ],
)
def test_the_smallest_card_in_use_or_rules_toml_chooses(monkeypatch, tmp_path, names, rules, gpus, memory_gb, memory):
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml([Card(total_gb=CARDS[name]) for name in names]))
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

"""train.toml: what is refused and how, what counts as the same config, and that rewriting keeps the rest."""

from __future__ import annotations

import os
import re
import string
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.errors import ConfigError, ExitCode
from nightshift.train_toml import config, keys
from nightshift.train_toml import text as toml_text
from nightshift.train_toml.config import ABSENT, Config
from nightshift.train_toml.values import Kind
from tests.waiting import cpu_seconds_of_children

ROOT = Path(__file__).parents[2]
SHIPPED = (ROOT / "train.toml").read_bytes()
SMALL = b"""\
seq_len = 512

[orchestrator]
batch_size = 64   # rollouts
group_size = 4

[trainer.optim]
lr = 3e-6         # peak
"""
FUZZ = settings(max_examples=150)


def refusal(source: bytes | str) -> str:
    """The one line with which a train.toml is refused."""
    with pytest.raises(ConfigError) as caught:
        config.parse(source.encode() if isinstance(source, str) else source)
    message = str(caught.value)
    assert_one_clean_line(message)
    return message


def assert_one_clean_line(message: str) -> None:
    assert message
    assert all(32 <= ord(char) < 127 for char in message), message
    assert len(message) <= 500


def small(**changes: Any) -> Config:
    return config.parse(config.set_values(SMALL, {path.replace("__", "."): value for path, value in changes.items()}))


def added(line: str) -> str:
    """SMALL with a line at its top."""
    return f"{line}\n{SMALL.decode()}"


# -- the shipped file ---------------------------------------------------------------------------------


def test_shipped_file_holds_the_agreed_values() -> None:
    shipped = config.load(ROOT / "train.toml")
    agreed = {
        "trainer.optim.type": "adamw",
        "trainer.optim.lr": 3e-6,
        "trainer.optim.weight_decay": 0.01,
        "trainer.scheduler.type": "constant",
        "orchestrator.batch_size": 256,
        "orchestrator.group_size": 4,
        "orchestrator.train.sampling.temperature": 1.0,
        "orchestrator.train.sampling.max_completion_tokens": 1024,
        "max_steps": None,
        "trainer.model.ac": None,
        "trainer.model.ac_offloading": None,
        "trainer.model.optim_cpu_offload": False,
    }
    assert {key: shipped.get(key) for key in agreed} == agreed


def test_every_key_of_the_shipped_file_has_a_comment_and_fits_a_screen() -> None:
    lines = SHIPPED.decode().split("\n")
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 120
    assert [line for line in lines if "=" in line and "#" not in line] == []


# -- what must be refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "start", "fix"),
    [
        (added("a = = 1"), 'train.toml:1: "a = = 1" is not TOML', "Correct the line"),
        (SMALL.decode() + "type = adamw\n", 'train.toml:9: "type = adamw" is not TOML', '"adamw"'),
        (SMALL.decode() + "nesterov = True\n", 'train.toml:9: "nesterov = True" is not TOML', "Write true in lower"),
        (SMALL.decode() + "lr = 1e-6\n", 'train.toml:9: "lr = 1e-6" is not TOML', "written twice"),
        (added("optim.lr = 1e-6"), "train.toml:1: optim.lr = 1e-6 is unknown", "trainer.optim.lr"),
        (added('model.name = "gpt2"'), 'train.toml:1: model.name = "gpt2" is locked: the rules own it', "Delete it"),
        (added("trainer.gc.interval = 1"), "train.toml:1: trainer.gc.interval = 1 is locked: the engine", "Delete it"),
        (added("trainer.max_steps = 9"), "train.toml:1: trainer.max_steps = 9 is locked", "Write max_steps at the top"),
        (SMALL.replace(b"3e-6", b'"3e-6"'), 'train.toml:8: trainer.optim.lr = "3e-6" is text', "lr = 3e-6"),
        (SMALL.replace(b"64", b"64.0"), "train.toml:4: orchestrator.batch_size = 64.0 is a decimal", "batch_size = 64"),
        (SMALL.replace(b"64", b"true"), "train.toml:4: orchestrator.batch_size = true is true/false", "whole number"),
        (SMALL.replace(b"3e-6", b"nan"), "train.toml:8: trainer.optim.lr = nan is not finite", "lr = 1e-6"),
        (SMALL.replace(b"3e-6", b"3.0"), "train.toml:8: trainer.optim.lr = 3.0 is out of range", "at most 1"),
        (SMALL.replace(b"3e-6", b"2026-01-01"), "train.toml:8: trainer.optim.lr = 2026-01-01 is a date", "a number"),
        (SMALL.replace(b"3e-6", b"[3e-6]"), "train.toml:8: trainer.optim.lr = [3e-6] is a list", "a number"),
        (SMALL.replace(b"= 4", b"= 5"), "train.toml:4: orchestrator.batch_size = 64: groups of 5", "batch_size = 60"),
        (b"", "train.toml is empty", "git checkout train.toml"),
        (b" \n\t\n", "train.toml is empty", "git checkout train.toml"),
        (b"\x89PNG\r\n\x1a\n\0\0", "train.toml:1: byte 0x89 is not UTF-8 text", "git checkout train.toml"),
        (SMALL + b"\0", "train.toml:9: a zero byte", "git checkout train.toml"),
        (b"\xef\xbb\xbf" + SMALL, "train.toml:1: a byte order mark", "UTF-8 without"),
        (b"#" * 10_000_000, "train.toml has 10,000,000 bytes", "git checkout train.toml"),
        (added("x = " + "1" * 5000), "train.toml:1: 5,004 characters on one line", "below 1,000"),
        (added("x = " + "1" * 900), "train.toml:1: x = ", "--keys"),
        (added("a = " + "[" * 900 + "]" * 90), "train.toml is nested too deeply", "Write plain"),
        ("[orchestrator]\nbatch_size = 8\n", "train.toml: orchestrator.group_size = 1 (the default)", "Write gr"),
        ('trainer = "fast"\n', 'train.toml:1: trainer = "fast" is not a table', "Write [trainer]"),
        (SMALL + b"type = 'adam'\n", 'train.toml:9: trainer.optim.type = "adam" is not a choice', '"adamw", "sgd"'),
        (SMALL + b"mu = 0.9\n", "train.toml:9: trainer.optim.mu = 0.9 has no effect", 'write type = "muon"'),
    ],
)  # fmt: skip
def test_bad_files_are_refused_with_line_value_and_fix(source: bytes | str, start: str, fix: str) -> None:
    message = refusal(source)
    assert message.startswith(start)
    assert fix in message


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ("max_steps = 5\ntrainer.scheduler = {type = 'linear', decay_steps = 0}", "a warm-up of 10 steps never ends"),
        ("max_steps = 10\ntrainer.scheduler = {type = 'cosine', warmup_steps = 10}", "never ends within max_steps 10"),
        ("max_steps = 19\ntrainer.scheduler = {type = 'linear'}", "10 + decay_steps 10 exceed max_steps 19"),
        ("trainer.scheduler.type = 'cosine'", "ends at max_steps, which is not set"),
        ("trainer.scheduler.type = 'linear'", "or decay_steps = 0"),
        ("trainer.scheduler = {type = 'linear', warmup_steps = 0, decay_steps = 0}", "both 0"),
        ("trainer.scheduler = {type = 'linear', decay_steps = 0, min_lr = 1e-3}", "min_lr exceeds lr = 3e-6"),
        ("trainer.scheduler.warmup_steps = 3", "has no effect with trainer.scheduler.type = \"constant\""),
        ("orchestrator.token_batch_size = 4096", "orchestrator.batch_size = 64 cannot stand beside"),
        ("orchestrator.concurrency.max_inflight = 3", "cannot hold a group of 4"),
        ("orchestrator.concurrency = {min_inflight = 9, initial_inflight = 8}", "9 exceeds orchestrator.concurrency.i"),
        ("orchestrator.concurrency = {min_inflight = 9, max_inflight = 8}", "9 exceeds orchestrator.concurrency.m"),
        ("orchestrator.concurrency = {initial_inflight = 2000}", "max_inflight = 1024"),
        ("orchestrator.train.sampling.max_completion_tokens = 512", "no room for its prompt in seq_len 512"),
        ("orchestrator.algo.decay = 0.5", "write type = \"rae\""),
        ("orchestrator.algo = {type = 'max_rl', length_penalty = {}}", "write type = \"grpo\""),
        ("orchestrator.algo.type = 'opd'", "is locked: the rules refuse it (it needs a teacher"),
        ("trainer.loss.type = 'custom'", "is locked: the rules refuse it (it imports code)"),
        ("trainer.loss.import_path = 'os.system'", "is locked"),
        ("trainer.loss.dppo_mask_high = 5.0", "out of range"),
        ("trainer.model.ac = 'None'", "Write ac_offloading = \"None\" too"),
        ("trainer.model.ac = false", "write ac = \"None\""),
        ("trainer.model.fsdp_cpu_offload = true", "optim_cpu_offload is on as well"),
        ("trainer.model.lora.target_modules = ['.*(a+)+$']", "holds \".*(a+)+$\""),
        ("trainer.model.lora.target_modules = []", "is empty"),
        ("trainer.model.lora.target_modules = ['q_proj', 'q_proj']", "repeats"),
        ("trainer.model.lora.modules_to_save = ['lm_head']", "is locked"),
        ("inference.vllm = {max_num_seqs = 512, max_num_batched_tokens = 256}", "less than one token"),
        ("inference.vllm.max-num-seqs = 8", "max_num_seqs"),
        ("orchestrator.train.source.curriculum.gates.a = {reject_min = 1, reject_max = 0}", "exceeds reject_max = 0.0"),
        ("orchestrator.train.source.curriculum.gates.\"../x\" = {}", "is unknown"),
        ("orchestrator.train.source.curriculum.sampler.seed = 7", "is locked: the rules own it (seeds are fixed)"),
        ("orchestrator.train.source.curriculum.sampler = {type = 'difficulty_pool', pools.a.weight = 1}", "no thre"),
        (
            "orchestrator.train.source.curriculum.sampler = {type = 'difficulty_pool', "
            "pools = {a = {weight = 1, threshold = 1}, b = {weight = 1, threshold = 1.0}}}",
            "two pools have the same threshold",
        ),
        (
            "orchestrator.train.source.curriculum.sampler = {type = 'difficulty_pool', "
            "pools = {a = {weight = 0, threshold = 1}}}",
            "no pool has a weight above 0",
        ),
        ("orchestrator.train.source.curriculum.sampler.pools.a = {weight = 1, threshold = 1}", "difficulty_pool"),
        ("orchestrator.train.source = [{curriculum = {}}]", "is [orchestrator.train.source.curriculum]"),
    ],
)  # fmt: skip
def test_rules_between_keys(lines: str, cause: str) -> None:
    flat = "seq_len = 512\norchestrator.batch_size = 64\norchestrator.group_size = 4\ntrainer.optim.lr = 3e-6\n"
    assert cause in refusal(f"{flat}{lines}\n")


def test_muon_and_nesterov_have_their_own_limits() -> None:
    off = "trainer.model = {fsdp_cpu_offload = true, optim_cpu_offload = false}\norchestrator.group_size = 4\n"
    config.parse(f"trainer.optim.type = 'adamw'\n{off}".encode())
    assert "muon" in refusal(f"trainer.optim.type = 'muon'\n{off}")
    assert "Nesterov" in refusal(b"orchestrator.group_size = 2\ntrainer.optim = {type = 'sgd', momentum = 0}\n")
    config.parse(b"orchestrator.group_size = 2\ntrainer.optim = {type = 'sgd', momentum = 0, nesterov = false}\n")


def test_rae_needs_no_group() -> None:
    config.parse(b"orchestrator = {group_size = 1, algo = {type = 'rae', decay = 0.9}}\n")
    assert "max_rl compares" in refusal("orchestrator = {group_size = 1, algo = {type = 'max_rl'}}\n")


@pytest.mark.parametrize(
    "text",
    [
        'model.name = "x"',
        'model = {name = "x"}',
        '"model".name = "x"',
        "'model'.'name' = 'x'",
        '"\\u006dodel"."\\u006eame" = "x"',
        '[model]\nname = "x"',
        '[model]\n"name" = """\nx"""',
        '["model"]\nname = "x"',
        '[[model]]\nname = "x"',
        "[model]",
        'model = "x"',
        "model = []",
        "[[model.vlm]]",
        'trainer.model.name = "x"',
        'trainer = {model = {name = "x"}}',
        '[trainer.model]\nname = "x"',
        '[trainer]\n"model".name = "x"',
        '[[orchestrator.train.source]]\nenv.taskset.id = "x"',
        'orchestrator.train.source.env.taskset.id = "x"',
        "orchestrator.train.sampling.extra_body = {seed = 1}",
        'trainer.env_vars.LD_PRELOAD = "x"',
        "inference.vllm.seed = 1",
        'inference.vllm.dtype = "float16"',
    ],
)
def test_every_spelling_of_a_locked_key_is_refused(text: str) -> None:
    message = refusal(f"orchestrator.group_size = 4\n{text}\n")
    assert "the rules own it" in message or "The sources belong to the rules" in message


@pytest.mark.parametrize(
    "text",
    [
        '"m\\u043edel" = {}',
        '"\\uff4dodel".name = 1',
        '" model" = 1',
        '"model\\u200b".name = 1',
        '"" = 1',
        '"model." = 1',
    ],
)
def test_look_alikes_are_unknown_and_shown_with_their_escapes(text: str) -> None:
    message = refusal(added(text))
    assert "is unknown" in message
    assert message.startswith("train.toml:1: ")


def test_a_dotted_key_in_quotes_is_not_the_key() -> None:
    assert "is unknown. Did you mean trainer.optim.lr?" in refusal(b'"trainer.optim.lr" = 1e-6\n')


def test_several_problems_are_counted_on_the_line_of_the_first() -> None:
    message = refusal(added("one = 1\ntwo = 2\nthree = 3"))
    assert message.startswith("train.toml:1: one = 1 is unknown")
    assert message.endswith("(and 2 more)")
    assert refusal(added("\n".join(f"k{n} = 1" for n in range(40)))).endswith("(and 10+ more)")


# -- reading ------------------------------------------------------------------------------------------


def test_load_refuses_what_is_not_a_plain_file(tmp_path: Path) -> None:
    def load(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            config.load(path)
        assert caught.value.exit_code == ExitCode.USAGE
        assert_one_clean_line(str(caught.value))
        return str(caught.value)

    path = tmp_path / "train.toml"
    assert "does not exist" in load(path)
    assert "not a regular file" in load(tmp_path)
    (tmp_path / "other.toml").write_bytes(SMALL)
    path.symlink_to(tmp_path / "other.toml")
    assert "symbolic link" in load(path)
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in load(path)  # and does not wait for a writer
    path.unlink()
    with path.open("wb") as file:
        file.truncate(10_000_000)
    assert "has 10,000,000 bytes" in load(path)
    strange = tmp_path / "\x1b[31m\u202e\n.toml"
    strange.write_bytes(b"x = 1\n")
    assert "\\u001b" in load(strange)
    assert "\\u001b" in load(Path("\x1b\0.toml"))


def test_load_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_bytes(SMALL)
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("no /proc on this system")
    before = len(list(descriptors.iterdir()))
    config.load(tmp_path / "good.toml")
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError):
            config.load(path)
    assert len(list(descriptors.iterdir())) == before


def test_load_keeps_the_bytes_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_bytes(SMALL.replace(b"\n", b"\r\n"))
    loaded = config.load(path)
    assert loaded.source == path.read_bytes()
    assert loaded.hash == config.parse(SMALL).hash


def test_refusing_costs_a_tenth_of_a_second_and_no_heavy_import(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_bytes(SMALL + b"lrr = 1\n")
    code = (
        "import sys; from pathlib import Path; from nightshift.train_toml import config\n"
        "try: config.load(Path(sys.argv[1]))\n"
        "except config.ConfigError as error: print(error)\n"
        "assert not {'tomlkit', 'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(path)]
    took = []
    for _ in range(5):
        start = cpu_seconds_of_children()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        took.append(cpu_seconds_of_children() - start)
    assert "train.toml:9: trainer.optim.lrr = 1 is unknown" in done.stdout
    assert min(took) < 0.5  # 0.06 s alone on the machine that this was written on


@pytest.mark.parametrize(
    "source",
    [
        "\n".join(".".join(f"a{n}" for n in range(180)) + f".b{line} = 1" for line in range(64)),
        "\n".join(f"k{n}=1" for n in range(6000)),
        "\n".join(f'trainer.optim.k{n}="{"x" * 900}"' for n in range(68)),
        SMALL.decode() + "# c\n" * 15_000 + "zzz = 1",
        SMALL.decode() + 'zzz = """' + "\n" * 60_000 + '"""',
        SMALL.decode() + "zzz = [" + "\n'a'," * 10_000 + "]",
        '"' * 999 + "\n" + "'" * 999,
        "\n".join("[" + "a." * 300 + f"b{n}]" for n in range(100)),
    ],
    ids=["dots", "keys", "strings", "comments", "multi-line", "array", "quotes", "headers"],
)
def test_a_hostile_file_is_refused_quickly(source: str) -> None:
    start = time.process_time()
    refusal(source[: 64 * 1024])
    assert time.process_time() - start < 2.0


# -- line numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ("a = 1\nb = 2\n", "b", 2),
        ("a = 1\n\n# b = 3\n\nb = 2", "b", 5),
        ('a = """\nb = 2\n\n"""\nb = 2\n', "b", 5),
        ("a = '''\nb = 2'''\nb = 2\n", "b", 3),
        ('a = """x""""\nb = 2\n', "b", 2),
        ('a = """"x"""""\nb = 2\n', "b", 2),
        ('a = """\\"""\nb = 1"""\nb = 2\n', "b", 3),
        ("a = [\n  1, # ]\n  2,\n]\nb = 2\n", "b", 5),
        ('a = ["]", \'[\', "\\"]"]\nb = 2\n', "b", 2),
        ("a = {b = 1, c = [\n1]}\nb = 2\n", "a.c", 1),
        ("a = {b = 1, c = [\n1]}\nb = 2\n", "b", 3),
        ("x.a.b = 1\nx.a.c = 2\n", "x.a.c", 2),
        ("[x]\na = 1\n\n[x.y]\na = 1\n", "x.y.a", 5),
        ("[x]\na = 1\n\n[x.y]\na = 1\n", "x.y", 4),
        ("[x.y]\na = 1\n[x]\nz = 1\n", "x.z", 4),
        ('"x" = 1\n"y.z" = 2\n', "y_z", 2),
        ("[[x]]\na = 1\n[[x]]\na = 1\n", "x", 1),
        ("a = 1\r\n\r\nb = 2\r\n", "b", 3),
        ("a = 1 # \"\"\" '''\nb = 2\n", "b", 2),
        ("a = 1\n", "b", None),
    ],
)
def test_line_of(text: str, path: str, line: int | None) -> None:
    tomllib.loads(text)
    wanted = ("y.z",) if path == "y_z" else tuple(path.split("."))
    assert toml_text.line_of(text, wanted) == line


BARE = st.text(string.ascii_lowercase, min_size=1, max_size=2)
VALUES = st.sampled_from(
    ["1", "'#'", '"""\n\n"""', "'''\n[x]\n'''", "[1,\n# ]\n2]", "{q = 1}", '"\\""', "[[1],\n[2]]", '""']
)
STATEMENTS = st.one_of(
    st.tuples(st.lists(BARE, min_size=1, max_size=3), VALUES).map(lambda pair: f"{'.'.join(pair[0])} = {pair[1]}"),
    st.lists(BARE, min_size=1, max_size=2).map(lambda names: f"[{'.'.join(names)}]"),
    BARE.map(lambda name: f"[[{name}]]"),
    st.sampled_from(["", "# comment ' \"", "  "]),
)


@FUZZ
@given(st.lists(STATEMENTS, max_size=12))
def test_line_of_equals_the_first_prefix_that_has_the_key(pieces: list[str]) -> None:
    text = "".join(f"{piece}\n" for piece in pieces)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    expected: dict[tuple[str, ...], int] = {}
    line = 1
    for index, piece in enumerate(pieces):  # slow but plain: statements are known here
        for path in paths(tomllib.loads("".join(f"{part}\n" for part in pieces[: index + 1]))):
            expected.setdefault(path, line)
        line += piece.count("\n") + 1
    assert {path: toml_text.line_of(text, path) for path in paths(document)} == expected


def paths(node: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(node, dict):
        return []
    return [found for name, value in node.items() for found in [(*path, name), *paths(value, (*path, name))]]


# -- equality, diff -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "same",
    [
        SMALL + b"# a comment\n",
        SMALL.replace(b"3e-6", b"0.000003"),
        SMALL.replace(b"3e-6", b"0.3e-5"),
        SMALL.replace(b"= 64 ", b"= 6_4 "),
        b"trainer.optim.lr = 3e-6\norchestrator = {group_size = 4, batch_size = 64}\nseq_len = 512\n",
        SMALL + b"weight_decay = 0.01\ntype = 'adamw'\nmax_norm = 1\n",
        SMALL + b"betas2 = 0.999\n[trainer.model.ac]\n[trainer.model.compile]\nfullgraph = false\n",
        SMALL + b"[trainer.model]\nlora = 'None'\n",
        b"max_steps = 'None'\n" + SMALL,
        SMALL + b"[inference]\n[orchestrator.train.source.curriculum.sampler]\ntype = 'standard'\n",
    ],
)
def test_what_trains_the_same_has_the_same_hash(same: bytes) -> None:
    one, other = config.parse(SMALL), config.parse(same)
    assert one.hash == other.hash
    assert config.diff(one, other) == config.diff(other, one) == ()


def test_int_and_float_are_one_number_for_a_number_key() -> None:
    one, other = (config.parse(SMALL + line) for line in (b"max_norm = 2\n", b"max_norm = 2.0\n"))
    assert one.hash == other.hash
    assert one.values == other.values
    assert config.parse(SMALL + b"weight_decay = -0.0\n").hash == config.parse(SMALL + b"weight_decay = 0\n").hash


@pytest.mark.parametrize(
    "other",
    [
        SMALL.replace(b"3e-6", b"3.1e-6"),
        SMALL + b"type = 'muon'\n",
        SMALL + b"max_norm = 'None'\n",
        SMALL + b"[trainer.model.lora]\n",
        SMALL + b"[orchestrator.train.source.curriculum.gates.zero]\n",
        b"max_steps = 9\n" + SMALL,
    ],
)
def test_what_trains_otherwise_has_another_hash(other: bytes) -> None:
    assert config.parse(SMALL).hash != config.parse(other).hash
    assert config.diff(config.parse(SMALL), config.parse(other)) != ()


def test_list_order_does_not_matter() -> None:
    one, other = (
        config.parse(SMALL + b"[trainer.model.lora]\ntarget_modules = " + names)
        for names in (b"['q_proj', 'v_proj']\n", b"['v_proj', 'q_proj']\n")
    )
    assert one.hash == other.hash
    assert config.diff(one, other) == ()


def test_defaults_follow_the_variant() -> None:
    assert config.parse(SMALL).get("trainer.optim.betas2") == 0.999
    muon = config.parse(SMALL + b"type = 'muon'\n")
    assert muon.get("trainer.optim.betas2") == 0.95
    assert muon.get("trainer.optim.nesterov") is None
    assert muon.get("trainer.optim.lr") == 3e-6
    assert (
        config.parse(b"orchestrator = {group_size = 4, token_batch_size = 9}\n").get("orchestrator.batch_size") is None
    )
    with pytest.raises(KeyError):
        muon.get("model.name")


def test_diff_is_written_as_a_person_would() -> None:
    old = config.parse(SMALL + b"max_norm = 0.5\nweight_decay = 0.01\n")
    new = config.parse(
        SMALL.replace(b"3e-6", b"0.000005") + b"betas1 = 0.8\n[trainer.model]\nac = 'None'\nac_offloading = 'None'\n"
        b"[trainer.model.lora]\nrank = 8\n[orchestrator.train.source.curriculum.gates.zero]\n"
    )
    assert config.diff(old, new) == (
        "trainer.optim.lr 3e-6 -> 5e-6",
        "+orchestrator.train.source.curriculum.gates.zero on",
        "+trainer.optim.betas1 0.8 (default 0.9)",
        "+trainer.model.ac None (default on)",
        "+trainer.model.ac_offloading None (default on)",
        "+trainer.model.lora on (default off)",
        "+trainer.model.lora.rank 8 (default 16)",
        "-trainer.optim.max_norm 0.5 (default 1.0)",
    )
    assert config.diff(new, old)[0] == "trainer.optim.lr 5e-6 -> 3e-6"
    assert "trainer.optim.type adamw -> muon" in config.diff(
        config.parse(SMALL + b"type = 'adamw'\n"), config.parse(SMALL + b"type = 'muon'\n")
    )
    assert config.diff(None, config.parse(SMALL)) == (
        "+seq_len 512 (default 2048)",
        "+orchestrator.batch_size 64 (default 128)",
        "+orchestrator.group_size 4 (default 1)",
        "+trainer.optim.lr 3e-6 (default 1e-6)",
    )


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        config.parse(SMALL).values["seq_len"] = 1  # type: ignore[index]


# -- for engines --------------------------------------------------------------------------------------


def test_effective_adds_rules_and_variant_types() -> None:
    parsed = config.parse(SMALL + b"[trainer.loss]\nkl_tau = 0\n")
    merged = config.effective(parsed, {"model.name": "m", "inference.server.port": 1})
    assert merged["trainer.optim.type"] == "adamw"
    assert merged["trainer.loss.type"] == "default"
    assert merged["model.name"] == "m"
    assert "trainer.scheduler.type" not in merged
    with pytest.raises(ValueError, match=r"trainer\.optim\.lr is open"):
        config.effective(parsed, {"trainer.optim.lr": 1.0})


def test_nested_is_what_toml_says() -> None:
    text = SHIPPED.decode() + "\n[trainer.model.lora]\ntarget_modules = ['q_proj']\n[trainer.model.compile]\n"
    nested = config.nested(config.parse(text.encode()).values)
    document = tomllib.loads(text)
    for switched_off in ("ac", "ac_offloading"):
        assert document["trainer"]["model"].pop(switched_off) == "None"
        assert nested["trainer"]["model"].pop(switched_off, 0) is None
    assert nested == document


def test_nested_puts_the_curriculum_into_every_source() -> None:
    parsed = config.parse(SMALL + b"[orchestrator.train.source.curriculum.gates.zero]\nreject_max = 0.1\n")
    sources = [{"name": "a", "env": {"taskset": {"id": "x"}}}, {"name": "b"}]
    nested = config.nested(config.effective(parsed, {keys.SOURCE: sources}))
    curriculum = {"gates": {"zero": {"type": "advantage_range", "reject_max": 0.1}}}
    assert nested["orchestrator"]["train"]["source"] == [{**source, "curriculum": curriculum} for source in sources]
    assert all("curriculum" not in source for source in sources)


# -- rewriting ----------------------------------------------------------------------------------------


def test_set_values_changes_a_value_and_nothing_else() -> None:
    changed = config.set_values(SHIPPED, {"trainer.optim.lr": 5e-6})
    assert changed == SHIPPED.replace(b"lr = 3e-6", b"lr = 5e-6")


def test_set_values_puts_a_new_key_into_its_table_above_the_next_comment() -> None:
    source = SMALL + b"\n# about the schedule\n[trainer.scheduler]\ntype = 'constant'\n"
    changed = config.set_values(source, {"trainer.optim.weight_decay": 0.1, "max_steps": 40}).decode()
    assert "# peak\nweight_decay = 0.1\n\n# about the schedule\n[trainer.scheduler]" in changed
    assert changed.startswith("seq_len = 512\nmax_steps = 40\n\n[orchestrator]")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"trainer.model.lora": {}}, {"trainer.model.lora": {}}),
        ({"trainer.model.lora.rank": 8}, {"trainer.model.lora": {}, "trainer.model.lora.rank": 8}),
        ({"trainer.model.ac": {}, "trainer.model.ac.freq": 2}, {"trainer.model.ac": {}, "trainer.model.ac.freq": 2}),
        ({"trainer.model.ac.freq": 2}, {"trainer.model.ac": {}, "trainer.model.ac.freq": 2}),
        ({"trainer.optim.max_norm": None}, {"trainer.optim.max_norm": None}),
        ({"trainer.optim.weight_decay": ABSENT}, {"trainer.optim.weight_decay": ABSENT}),
        ({"orchestrator.train.sampling.max_completion_tokens": None},
         {"orchestrator.train.sampling.max_completion_tokens": ABSENT}),
        ({"trainer.model.compile": None}, {"trainer.model.compile": None}),
        ({"trainer.optim.nesterov": False, "trainer.optim.type": "sgd"},
         {"trainer.optim.nesterov": False, "trainer.optim.type": "sgd"}),
        ({"trainer.model.lora.target_modules": ("q_proj", "v_proj")},
         {"trainer.model.lora": {}, "trainer.model.lora.target_modules": ("q_proj", "v_proj")}),
    ],
)  # fmt: skip
def test_set_values_switches_and_removes(change: dict[str, Any], expected: dict[str, Any]) -> None:
    wanted = {**config.parse(SHIPPED).values, **expected}
    wanted = {path: value for path, value in wanted.items() if value is not ABSENT}
    assert config.parse(config.set_values(SHIPPED, change)).values == wanted


@pytest.mark.parametrize(
    "source",
    [
        b"orchestrator = {group_size = 4, batch_size = 8} # c\ntrainer.optim.lr = 1e-6 # d\n",
        b"[orchestrator]\ngroup_size = 4\nbatch_size = 8\n[trainer]\noptim.lr = 1e-6\nmodel = {lora = {rank = 4}}\n",
        b"trainer.optim.lr = 1e-6\n[orchestrator]\ngroup_size = 4\n[trainer.model.lora]\n[orchestrator.algo]",
    ],
)
def test_set_values_copes_with_inline_and_dotted_tables(source: bytes) -> None:
    change = {
        "trainer.optim.weight_decay": 0.1,
        "orchestrator.max_off_policy_steps": 3,
        "trainer.model.lora.alpha": 8.0,
    }
    before, after = config.parse(source), config.parse(config.set_values(source, change))
    assert after.values == {**before.values, "trainer.model.lora": {}, **change}


def test_set_values_refuses_what_a_person_could_not_write() -> None:
    for change in ({"trainer.optim.lr": -1.0}, {"orchestrator.group_size": 7}, {"trainer.optim.lr": 'x" # "'}):
        with pytest.raises(ConfigError):
            config.set_values(SMALL, change)
    with pytest.raises(KeyError):
        config.set_values(SMALL, {"model.name": None})
    with pytest.raises(ConfigError, match="locked"):
        config.set_values(SMALL, {"model.name": "x"})


PROPOSALS = st.fixed_dictionaries(
    {},
    optional={
        "trainer.optim.lr": st.floats(1e-9, 1e-2),
        "trainer.optim.weight_decay": st.floats(0, 1),
        "trainer.optim.betas2": st.floats(0, 0.999),
        "trainer.optim.max_norm": st.one_of(st.none(), st.floats(0.01, 100)),
        "trainer.loss.kl_tau": st.floats(0, 1),
        "orchestrator.batch_size": st.integers(1, 200).map(lambda n: n * 4),
        "orchestrator.max_off_policy_steps": st.integers(0, 20),
        "orchestrator.train.filter_zero_advantages": st.booleans(),
        "max_steps": st.one_of(st.none(), st.integers(1, 1000)),
        "trainer.model.lora": st.sampled_from([None, {}]),
        "trainer.model.compile": st.sampled_from([None, {}]),
        "trainer.model.ac": st.sampled_from([None, {}]),
        "trainer.model.reduce_dtype": st.sampled_from(["bfloat16", "float32"]),
    },
)


@settings(FUZZ, max_examples=40)
@given(PROPOSALS)
def test_set_values_keeps_comments_and_order(change: dict[str, Any]) -> None:
    before = config.parse(SHIPPED)
    # A key that leaves takes the comment on its own line with it: keep those out of this test.
    change = {path: value for path, value in change.items() if path != "trainer.model.ac" or value is None}
    after = config.parse(config.set_values(SHIPPED, change))
    assert comments(after.source) == comments(SHIPPED)
    kept = [path for path in after.values if path in before.values]
    assert kept == [path for path in before.values if path in after.values]
    unset = {path for path, value in change.items() if value is None and keys.default(path, before.resolved) is None}
    expected = {**before.values, **{path: value for path, value in change.items() if path not in unset}}
    assert after.values == {path: value for path, value in expected.items() if path not in unset}
    assert config.set_values(after.source, change) == after.source


def comments(source: bytes) -> list[str]:
    return re.findall(r"#.*", source.decode())


# -- fuzz ---------------------------------------------------------------------------------------------

EDITS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 30),
        st.one_of(
            st.binary(max_size=6),
            st.text(max_size=6).map(lambda text: text.encode("utf-8", "replace")),
            st.sampled_from(
                [b"\n", b"=", b'"', b'"""', b"[", b"]", b"{", b"}", b".", b"'", b"\x1b[2J", b"-1", b"1e999"]
            ),
            st.sampled_from([b'"None"', b"true", b"\nmodel.name = 'x'\n", b"[[a]]\n", b"[trainer]\n", b"1979-05-27"]),
        ),
    ),
    min_size=1,
    max_size=4,
)


@FUZZ
@given(EDITS)
def test_a_mutated_file_is_taken_or_refused_in_one_line(edits: list[tuple[float, int, bytes]]) -> None:
    source = SHIPPED
    for place, cut, insertion in edits:
        start = int(place * len(source))
        source = source[:start] + insertion + source[start + cut :]
    try:
        parsed = config.parse(source)
    except ConfigError as error:
        assert_one_clean_line(str(error))
    else:
        assert parsed.values.keys() <= {*parsed.resolved}
        assert all(keys.variants(tuple(path.split("."))) for path in parsed.values)


TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=6,
)


@FUZZ
@given(st.sampled_from([key.path for key in keys.KEYS if keys.ANY not in key.path]), TREES)
def test_any_value_of_any_key_is_taken_or_refused_in_one_line(path: str, value: Any) -> None:
    import tomlkit

    document: dict[str, Any] = {"orchestrator": {"group_size": 4}}
    node = document
    for segment in path.split(".")[:-1]:
        node = node.setdefault(segment, {})
    node[path.rpartition(".")[2]] = without_null(value)
    source = tomlkit.dumps(document).encode("utf-8", "replace")
    try:
        parsed = config.parse(source)
    except ConfigError as error:
        assert_one_clean_line(str(error))
    else:
        [key, *_] = keys.variants(tuple(path.split(".")))
        assert key.kind is Kind.TABLE or path in parsed.values or value == {}


def without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_null(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_null(inner) for inner in value]
    return "None" if value is None else value

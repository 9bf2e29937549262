"""train.toml: what is refused and how, and what counts as the same config."""

import time

import pytest

from nightshift.config.train_toml import diff, parse
from tests.train_tomls import SMALL, refusal


def added(line: str) -> str:
    """SMALL with a line at its top."""
    return f"{line}\n{SMALL.decode()}"


LOOK_ALIKES = ('"m\\u043edel" = {}', '"\\uff4dodel".name = 1', '" model" = 1', '"model\\u200b".name = 1', '"" = 1')


@pytest.mark.parametrize(
    ("source", "start", "fix"),
    [
        (added("a = = 1"), 'train.toml:1: "a = = 1" is not TOML', "Correct the line"),
        (SMALL.decode() + "type = adamw\n", 'train.toml:9: "type = adamw" is not TOML', "text in double quotes"),
        (SMALL.decode() + "lr = 1e-6\n", 'train.toml:9: "lr = 1e-6" is not TOML', "every key and table once"),
        (added("optim.lr = 1e-6"), "train.toml:1: optim.lr = 1e-6 is prime-rl", "under [trainer.optim]"),
        (added('model.name = "gpt2"'), 'train.toml:1: model.name = "gpt2" is locked by', "Delete [model]; "),
        (added("trainer.max_steps = 9"), "train.toml:1: trainer.max_steps = 9 is now max_", "steps = 9 at the top"),
        (SMALL.replace(b"3e-6", b'"3e-6"'), 'train.toml:8: trainer.optim.lr = "3e-6" is not allowed', "lr = 3e-6"),
        (SMALL.replace(b"3e-6", b"nan"), "train.toml:8: trainer.optim.lr = nan is not allowed", "lr = 1e-6"),
        (SMALL.replace(b"= 4", b"= 5"), "train.toml:4: orchestrator.batch_size = 64: groups of 5", "batch_size = 60"),
        ('"trainer.optim.lr" = 1e-6\n', "train.toml:1: ", "is unknown. Did you mean trainer.optim.lr?"),
        *((added(text), "train.toml:1: ", "is unknown") for text in (*LOOK_ALIKES, '"model." = 1')),
        (b"", "train.toml: orchestrator.group_size = 1 (the default)", "Write gr"),
        (b"\x89PNG\r\n\x1a\n\0\0", "train.toml: 'utf-8' codec can't decode byte 0x89", "git checkout train.toml"),
        (b"#" * 10_000_000, "train.toml has 10,000,000 bytes", "git checkout train.toml"),
        (added("x = " + "1" * 5000), "train.toml:1: 5,004 characters on one line", "below 1,000"),
        (added("a = " + "[" * 900 + "]" * 90), "train.toml: it is nested too deeply", "git checkout"),
        ('trainer = "fast"\n', 'train.toml:1: trainer = "fast" is not one table', "Write [trainer]"),
        (SMALL + b"type = 'adam'\n", 'train.toml:9: trainer.optim.type = "adam" is not allowed', 'type = "adamw"'),
        (SMALL + b"mu = 0.9\n", "train.toml:9: trainer.optim.mu = 0.9 has no effect", 'write type = "muon"'),
    ],
)  # fmt: skip
def test_bad_files_are_refused_with_line_value_and_fix(source: bytes | str, start: str, fix: str) -> None:
    assert [line for line in refusal(source).split("\n") if line.startswith(start) and fix in line]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ("max_steps = 5\ntrainer.scheduler = {type = 'cosine'}", "10 + decay_steps 0 exceed max_steps 5"),
        ("trainer.scheduler.type = 'cosine'", "ends at max_steps, which is not set"),
        ("trainer.scheduler = {type = 'linear', decay_steps = 0, min_lr = 1e-3}", "min_lr 0.001 exceeds lr 3e-6"),
        ("trainer.scheduler.warmup_steps = 3", "has no effect with trainer.scheduler.type = \"constant\""),
        ("orchestrator.token_batch_size = 4096", '_batch_size = 4096. Delete it, or write token_batch_size = "None"'),
        ("orchestrator.concurrency.max_inflight = 3", "group_size 4 exceeds max_inflight 3"),
        ("orchestrator.concurrency = {min_inflight = 9, initial_inflight = 8}", "min_inflight 9 exceeds initial"),
        ("orchestrator.train.sampling.max_completion_tokens = 512", "no room for its prompt in seq_len 512"),
        ("orchestrator.algo.decay = 0.5", "write type = \"rae\""),
        ("trainer.model.ac = false", "is not allowed ([table] or \"None\"). Write [trainer.model.ac]"),
        ("trainer.model = {ac = 'None', ac_offloading = {}}", "ac_offloading is on and would switch it on again"),
        ("trainer.loss.kwargs.clip = 2", 'has no effect with trainer.loss.type = "default"'),
        ("trainer.model.lora.target_modules = ['.*(a+)+$']", "is not allowed (list of 7 names"),
        ("inference.vllm = {max_num_seqs = 512, max_num_batched_tokens = 256}", "max_num_seqs 512 exceeds max"),
        ("orchestrator.train.source.curriculum.gates.a = {reject_min = 1, reject_max = 0}", "reject_min 1.0 exceeds"),
        ("orchestrator.train.source.curriculum.sampler.seed = 7", "is locked by the rules: seeds are fixed"),
        ("orchestrator.train.source.curriculum.sampler.pools.a = {weight = 1, threshold = 1}", "difficulty_pool"),
        ("orchestrator.train.source = [{curriculum = {}}]", "is not one table. Write [orchestrator.train.sou"),
    ],
)  # fmt: skip
def test_rules_between_keys(lines: str, cause: str) -> None:
    flat = "seq_len = 512\norchestrator.batch_size = 64\norchestrator.group_size = 4\ntrainer.optim.lr = 3e-6\n"
    assert cause in refusal(f"{flat}{lines}\n")


def test_rae_needs_no_group() -> None:
    parse(b"orchestrator = {group_size = 1, algo = {type = 'rae', decay = 0.9}}\n")
    assert "max_rl compares" in refusal("orchestrator = {group_size = 1, algo = {type = 'max_rl'}}\n")


def test_the_name_of_a_gate_cannot_be_the_pattern_of_names() -> None:
    for name in ("*", "../x", "a.b"):
        assert f'"{name}" = {{}} is unknown' in refusal(f"orchestrator.train.source.curriculum.gates.'{name}' = {{}}\n")


@pytest.mark.parametrize(
    "source",
    [
        "\n".join(".".join(f"a{n}" for n in range(180)) + f".b{line} = 1" for line in range(64)),
        SMALL.decode() + 'zzz = """' + "\n" * 60_000 + '"""',
        SMALL.decode() + "zzz = [" + "\n'a'," * 10_000 + "]",
    ],
    ids=["dots", "multi-line", "array"],
)
def test_a_hostile_file_is_refused_quickly(source: str) -> None:
    start = time.process_time()
    refusal(source[: 64 * 1024])
    assert time.process_time() - start < 2.0


MODULES = SMALL + b"[trainer.model.lora]\ntarget_modules = "


@pytest.mark.parametrize(
    ("source", "same"),
    [
        (SMALL, SMALL + b"# a comment\n"),
        (SMALL, SMALL.replace(b"3e-6", b"0.000003")),
        (SMALL, b"trainer.optim.lr = 3e-6\norchestrator = {group_size = 4, batch_size = 64}\nseq_len = 512\n"),
        (SMALL, SMALL + b"weight_decay = 0.01\ntype = 'adamw'\nmax_norm = 1\n"),
        (SMALL, b"max_steps = 'None'\n" + SMALL),
        (SMALL, SMALL + b"[inference]\n[orchestrator.train.source.curriculum.sampler]\ntype = 'standard'\n"),
        (SMALL + b"weight_decay = 0\n", SMALL + b"weight_decay = -0.0\n"),
        (MODULES + b"['q_proj', 'v_proj']\n", MODULES + b"['v_proj', 'q_proj']\n"),
    ],
)
def test_what_trains_the_same_has_the_same_hash(source: bytes, same: bytes) -> None:
    one, other = parse(source), parse(same)
    assert one.hash == other.hash
    assert diff(one, other) == diff(other, one) == ()


@pytest.mark.parametrize(
    "other",
    [
        SMALL.replace(b"3e-6", b"3.1e-6"),
        SMALL + b"type = 'muon'\n",
        SMALL + b"[trainer.model.lora]\n",
        SMALL + b"[trainer.model.ac]\n",  # prime-rl's default; what silence means is the preset's to say
    ],
)
def test_what_trains_otherwise_has_another_hash(other: bytes) -> None:
    assert parse(SMALL).hash != parse(other).hash
    assert diff(parse(SMALL), parse(other)) != ()


def test_defaults_follow_the_variant() -> None:
    assert parse(SMALL).get("trainer.optim.betas2") == 0.999
    muon = parse(SMALL + b"type = 'muon'\n")
    assert muon.get("trainer.optim.betas2") == 0.95
    assert muon.get("trainer.optim.nesterov") is None
    assert muon.get("trainer.optim.lr") == 3e-6
    assert parse(b"orchestrator = {group_size = 4, token_batch_size = 9}\n").get("orchestrator.batch_size") is None

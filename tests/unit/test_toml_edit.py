"""train.toml rewritten: the values that were asked for, and everything else as it was."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nightshift.config.allowlist import default
from nightshift.config.toml_edit import ABSENT, set_values
from nightshift.config.train_toml import parse
from nightshift.errors import ConfigError
from tests.train_tomls import FUZZ, SHIPPED, SMALL

LENGTH = "orchestrator.train.sampling.max_completion_tokens"


def test_puts_a_new_key_into_its_table_above_the_next_comment() -> None:
    source = SMALL + b"\n# about the schedule\n[trainer.scheduler]\ntype = 'constant'\n"
    changed = set_values(source, {"trainer.optim.weight_decay": 0.1, "max_steps": 40}).decode()
    assert "# peak\nweight_decay = 0.1\n\n# about the schedule\n[trainer.scheduler]" in changed
    assert changed.startswith("seq_len = 512\nmax_steps = 40\n\n[orchestrator]")


@pytest.mark.parametrize(
    ("change", "and_so"),
    [
        ({"trainer.model.lora": {}}, {}),
        ({"trainer.model.lora.rank": 8}, {"trainer.model.lora": {}}),
        ({"trainer.model.ac": {}, "trainer.model.ac.freq": 2}, {}),
        ({"trainer.model.ac.freq": 2}, {"trainer.model.ac": {}}),
        ({"trainer.model.ac.freq": ABSENT}, {}),  # of a table that is off, which stays so
        ({"trainer.optim.max_norm": None}, {}),
        ({"trainer.optim.weight_decay": ABSENT}, {}),
        ({LENGTH: None}, {LENGTH: ABSENT}),
        ({"trainer.model.compile": None}, {}),
        ({"trainer.optim.nesterov": False, "trainer.optim.type": "sgd"}, {}),
        ({"trainer.model.lora.target_modules": ("q_proj", "v_proj")}, {"trainer.model.lora": {}}),
    ],
)
def test_switches_and_removes(change: dict[str, Any], and_so: dict[str, Any]) -> None:
    wanted = {**parse(SHIPPED).values, **change, **and_so}
    wanted = {path: value for path, value in wanted.items() if value is not ABSENT}
    assert parse(set_values(SHIPPED, change)).values == wanted


@pytest.mark.parametrize(
    "source",
    [
        b"orchestrator = {group_size = 4, batch_size = 8} # c\ntrainer.optim.lr = 1e-6 # d\n",
        b"[orchestrator]\ngroup_size = 4\nbatch_size = 8\n[trainer]\noptim.lr = 1e-6\nmodel = {lora = {rank = 4}}\n",
        b"trainer.optim.lr = 1e-6\n[orchestrator]\ngroup_size = 4\n[trainer.model.lora]\n[orchestrator.algo]",
    ],
)
def test_copes_with_inline_and_dotted_tables(source: bytes) -> None:
    change = {
        "trainer.optim.weight_decay": 0.1,
        "orchestrator.max_off_policy_steps": 3,
        "trainer.model.lora.alpha": 8.0,
    }
    before, after = parse(source), parse(set_values(source, change))
    assert after.values == {**before.values, "trainer.model.lora": {}, **change}


def test_refuses_what_a_person_could_not_write() -> None:
    for change in ({"trainer.optim.lr": -1.0}, {"orchestrator.group_size": 7}, {"trainer.optim.lr": 'x" # "'}):
        with pytest.raises(ConfigError):
            set_values(SMALL, change)
    with pytest.raises(KeyError):
        set_values(SMALL, {"model.name": None})
    with pytest.raises(ConfigError, match="locked"):
        set_values(SMALL, {"model.name": "x"})


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
def test_keeps_comments_and_order(change: dict[str, Any]) -> None:
    before = parse(SHIPPED)
    # A key that leaves takes the comment on its own line with it: keep those out of this test.
    change = {path: value for path, value in change.items() if path != "trainer.model.ac" or value is None}
    after = parse(set_values(SHIPPED, change))
    assert comments(after.source) == comments(SHIPPED)
    kept = [path for path in after.values if path in before.values]
    assert kept == [path for path in before.values if path in after.values]
    unset = {path for path, value in change.items() if value is None and default(path, before.resolved) is None}
    expected = {**before.values, **{path: value for path, value in change.items() if path not in unset}}
    assert after.values == {path: value for path, value in expected.items() if path not in unset}
    assert set_values(after.source, change) == after.source


def comments(source: bytes) -> list[str]:
    return re.findall(r"#.*", source.decode())


def test_a_comment_stays_in_its_column() -> None:
    source = b"[orchestrator]\ngroup_size = 4\n[trainer.optim]\nlr = 3e-6         # peak\nmax_norm = 1.0 # norm\n"
    edited = set_values(source, {"trainer.optim.lr": 2.38e-5, "trainer.optim.max_norm": 0.129})
    assert edited.endswith(b"\nlr = 2.38e-5      # peak\nmax_norm = 0.129 # norm\n")
    assert b"\nlr = 3e-6         # peak\n" in set_values(edited, {"trainer.optim.lr": 3e-6})

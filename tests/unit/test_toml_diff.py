"""The difference of two train.toml: what a person would write, and what is read again from records."""

from itertools import pairwise

from nightshift.config.train_toml import Change, Config, changes_of, diff, parse
from tests.prime_rl_plans import open_configs
from tests.train_tomls import SMALL


def lines(old: Config, new: Config) -> list[str]:
    return [change.line for change in diff(old, new)]


def test_diff_is_written_as_a_person_would() -> None:
    old = parse(SMALL + b"max_norm = 0.5\nweight_decay = 0.01\n")
    new = parse(
        SMALL.replace(b"3e-6", b"0.000005") + b"betas1 = 0.8\n[trainer.model]\nac = 'None'\nac_offloading = 'None'\n"
        b"[trainer.model.lora]\nrank = 8\n[orchestrator.train.source.curriculum.gates.zero]\n"
    )
    assert lines(old, new) == [
        "trainer.optim.lr 3e-6 -> 5e-6",
        "+orchestrator.train.source.curriculum.gates.zero on",
        "+trainer.optim.betas1 0.8 (default 0.9)",
        "+trainer.model.ac None (default by preset)",
        "+trainer.model.ac_offloading None (default by preset)",
        "+trainer.model.lora on (default off)",
        "+trainer.model.lora.rank 8 (default 16)",
        "-trainer.optim.max_norm 0.5 (default 1.0)",
    ]
    assert lines(new, old)[0] == "trainer.optim.lr 5e-6 -> 3e-6"
    one, other = parse(SMALL + b"type = 'adamw'\n"), parse(SMALL + b"type = 'muon'\n")
    assert "trainer.optim.type adamw -> muon" in lines(one, other)


def test_lines_of_records_are_taken_apart_and_junk_is_left_out() -> None:
    recorded = ("trainer.optim.lr 3e-6 -> 5e-6", "+a.b None (default 0)", "+pools.x on", "-c.d 4 (default unset)")
    assert changes_of((*recorded, "junk")) == (
        Change("trainer.optim.lr", "changed", "3e-6", "5e-6"),
        Change("a.b", "added", "0", "None"),
        Change("pools.x", "added", None, "on"),
        Change("c.d", "removed", "4", "unset"),
    )
    assert tuple(change.line for change in changes_of(recorded)) == recorded


def test_every_difference_is_read_again_as_it_was_written() -> None:
    num_checked = 0
    for old, new in pairwise([parse(SMALL), *open_configs().values()]):
        changes = diff(old, new)
        assert changes_of(change.line for change in changes) == changes
        assert {change.key for change in diff(new, old)} == {change.key for change in changes}
        num_checked += len(changes)
    assert num_checked > 100

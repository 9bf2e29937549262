"""train.toml files that several tests start from, and what every refusal looks like."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from nightshift.config.checks import MAX_PROBLEMS
from nightshift.config.train_toml import parse
from nightshift.errors import ConfigError

ROOT = Path(__file__).parents[1]
SHIPPED = (ROOT / "train.toml").read_bytes()
SMALL = b"""\
seq_len = 512

[orchestrator]
batch_size = 64   # rollouts
group_size = 4

[trainer.optim]
lr = 3e-6         # peak
"""
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def refusal(source: bytes | str) -> str:
    """The lines with which a train.toml is refused: one, or a heading and one for each problem."""
    with pytest.raises(ConfigError) as caught:
        parse(source.encode() if isinstance(source, str) else source)
    message = str(caught.value)
    assert_clean_lines(message)
    return message


def assert_clean_lines(message: str) -> None:
    heading, *problems = message.split("\n")
    assert len(problems) != 1
    assert len(problems) <= MAX_PROBLEMS
    for line in (heading, *problems):
        assert line
        assert all(32 <= ord(char) < 127 for char in line), message
        assert len(line) <= 600

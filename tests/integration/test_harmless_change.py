"""A change of the settings that provably does nothing: what A/A decides (benchmarks/aa.py) is then the rule alone."""

import math
import os
from dataclasses import replace
from pathlib import Path

from nightshift.config.train_toml import parse
from nightshift.engines.trl.engine import TrlEngine
from tests.conftest import living_children
from tests.rules import ARITHMETIC_TRL, ROOT

SMALL = replace(
    ARITHMETIC_TRL,
    environments=(replace(ARITHMETIC_TRL.environments[0], num_selection=16, num_train=64),),
    startup_seconds=math.inf,
)
BATCH = b"max_steps = 3\n[orchestrator]\nbatch_size = 16\ngroup_size = 4\n[orchestrator.train.sampling]\n"
BATCH += b"max_completion_tokens = 24\n[trainer.optim]\n"


def weights_of(engine: TrlEngine, line: bytes, folder: Path) -> tuple[object, str]:
    """(settings, sha256 of the final weights) of a run that ends by its steps."""
    settings = engine.validate(parse(BATCH + line)).settings
    folder.mkdir()
    session = engine.open(settings, 7, folder, math.inf)
    try:
        assert session.train(3600.0, lambda progress: None).num_steps == 3
        return settings, session.load_final_weights().sha256
    finally:
        session.close()


def test_a_norm_that_no_gradient_reaches_is_other_settings_and_the_same_weights(tmp_path: Path) -> None:
    engine = TrlEngine(SMALL, ROOT, dict(os.environ))
    lines = (b"max_norm = 100000.0", b"max_norm = 100001.0", b"max_norm = 100000.0\nlr = 1e-5")
    one, same, other = (weights_of(engine, line, tmp_path / str(index)) for index, line in enumerate(lines))
    assert one[0] != same[0], "these settings have one hash"
    assert one[1] == same[1]
    assert one[1] != other[1], "these weights tell nothing"
    assert living_children() == []

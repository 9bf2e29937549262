"""A loss of the user's: offered in rules.toml, named in train.toml, imported by prime-rl, chosen by TPE and agents."""

import importlib
import importlib.util
import json
import math
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from nightshift.agents.brief import compose
from nightshift.agents.search import SearchSpace
from nightshift.config.allowlist import LOSS, describe_keys
from nightshift.config.import_config import import_config
from nightshift.config.losses import keys_with
from nightshift.config.rules import Rules
from nightshift.config.rules_toml import chosen_in, rules_of
from nightshift.config.train_toml import ABSENT, parse, set_values
from nightshift.engines.base import used_keys
from nightshift.engines.prime_rl import engine as prime_rl
from nightshift.engines.prime_rl import validate
from nightshift.engines.prime_rl.config import effective
from nightshift.engines.prime_rl.install import environment_files
from nightshift.engines.prime_rl.validator import Refusal, explain
from nightshift.engines.trl.engine import TrlEngine
from nightshift.errors import Failure, UsageError
from nightshift.report.export.rl_toml import edited, rl_toml
from tests.campaigns import context_of, replace
from tests.rules import ARITHMETIC_TRL, ROOT
from tests.train_tomls import SHIPPED

CLIP = "trainer.loss.kwargs.clip"
OFFER = b"""environments = ["gsm8k"]
[loss.clipped]
package = "losses/clipped"
import_path = "clipped_loss.clipped"
parameters = { clip = { default = 0.2, low = 0.01, high = 1.0 } }
[loss.plain]
package = "losses/clipped"
import_path = "clipped_loss.plain"
"""
BASE = b"[orchestrator]\ngroup_size = 4\n"


def rules(offer: bytes = OFFER, root: Path = ROOT) -> Rules:
    return rules_of(root, chosen_in(root, offer), "prime-rl", 2)


def own(name: str = "clipped", source: bytes = SHIPPED, **parameters: Any) -> bytes:
    keys = {LOSS: name, "trainer.loss.ipo_threshold": ABSENT, "trainer.loss.kl_tau": ABSENT}
    return set_values(source, keys | {f"trainer.loss.kwargs.{key}": value for key, value in parameters.items()})


def trained(source: bytes) -> Any:
    return effective(parse(source), rules(), 448)["trainer"]["loss"]


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        act()
    return str(caught.value)


@pytest.fixture
def checkout_root(tmp_path: Path) -> Path:
    (tmp_path / "environments").symlink_to(ROOT / "environments")
    shutil.copytree(ROOT / "losses", tmp_path / "losses")
    return tmp_path


def test_prime_rl_gets_its_own_form_with_every_parameter() -> None:
    wanted = {"type": "custom", "import_path": "clipped_loss.clipped"}
    assert trained(own()) == wanted | {"kwargs": {"clip": 0.2}}
    assert trained(own(clip=0.5)) == wanted | {"kwargs": {"clip": 0.5}}
    assert trained(own("plain")) == wanted | {"import_path": "clipped_loss.plain"}
    assert trained(SHIPPED) == {"type": "ipo", "ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 0.001}
    assert trained(set_values(SHIPPED, {"trainer.optim.max_norm": None})) == trained(SHIPPED)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            '[trainer.loss]\ntype = "clipped"\n[trainer.loss.kwargs]\nclip = 3\nclap = 2\n',
            ["train.toml has 2 problems:",
             "train.toml:6: trainer.loss.kwargs.clip = 3.0 is not allowed (number 0.01 to 1.0). Write clip = 0.2 "
             "(the default) under [trainer.loss.kwargs]",
             "train.toml:7: trainer.loss.kwargs.clap = 2.0 is not a parameter of the loss clipped. Delete it; "
             "uv run run.py --keys lists the parameters"],
        ),
        (
            '[trainer.loss]\ntype = "custom"\nimport_path = "os.system"\n',
            ["train.toml has 2 problems:",
             'train.toml:4: trainer.loss.type = "custom" is not allowed (default | ipo | NAME of rules.toml). '
             'Write type = "default" (the default) under [trainer.loss]',
             'train.toml:5: trainer.loss.import_path = "os.system" is locked by the rules: it imports code. '
             "Delete it; write [loss.NAME] in rules.toml for a loss of your own"],
        ),
    ],
)  # fmt: skip
def test_what_the_rules_do_not_offer_is_refused_with_the_lines_to_write(text: str, lines: list[str]) -> None:
    assert refused(lambda: trained(BASE + text.encode())).split("\n") == lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[loss.clipped]", "[loss.ipo]"), "(custom|default|ipo)"),
        (
            ("losses/clipped", "/etc"),
            '[loss.clipped]: package = "/etc" is not a folder of this checkout with a package clipped_loss',
        ),
        (("high = 1.0", "high = 0.1"), "default 0.2 in 0.01 to 0.1: low < high, default between"),
        (
            ("[loss.clipped]", "[advantage.mine]\n[loss.clipped]"),
            "unknown field `advantage`",
        ),  # prime-rl cannot import advantages
    ],
)
def test_an_offer_that_cannot_be_kept_is_refused_in_one_line(change: tuple[str, str], message: str) -> None:
    text = refused(lambda: rules(OFFER.decode().replace(*change, 1).encode()))
    assert text.startswith("rules.toml: ")
    assert message in text
    assert "\n" not in text


def test_trl_refuses_it_in_one_line() -> None:
    engine = TrlEngine(ARITHMETIC_TRL, ROOT, dict(os.environ))
    text = refused(lambda: engine.validate(parse(own())))
    assert text.startswith("train.toml:")
    assert "\n" not in text
    assert 'trainer.loss.type = "clipped": --engine trl always uses TRL\'s loss' in text
    assert rules_of(ROOT, chosen_in(ROOT, OFFER.replace(b"gsm8k", b"arithmetic")), "trl", 0).losses == ()


def test_the_package_is_copied_and_hashed(checkout_root: Path) -> None:
    before = rules(root=checkout_root)
    name = "clipped_loss/__init__.py"
    source = (checkout_root / "losses/clipped" / name).read_bytes()
    assert environment_files(checkout_root, before)[name] == source
    assert "losses/clipped/clipped_loss/" in before.measuring
    hashes = {before.hash(checkout_root), rules(OFFER.replace(b"0.2", b"0.3"), checkout_root).hash(checkout_root)}
    (checkout_root / "losses/clipped" / name).write_bytes(source + b"# another\n")
    assert len({*hashes, before.hash(checkout_root)}) == 3
    (checkout_root / "losses/clipped/clipped_loss/more.py").write_text("a = 1\nb = = 2\n")
    text = refused(lambda: rules(root=checkout_root))
    assert "[loss.clipped]: losses/clipped/clipped_loss/more.py:2: invalid syntax" in text


def test_keys_show_the_losses_and_their_ranges() -> None:
    text = "\n".join(describe_keys((), "prime-rl", keys_with(rules().losses)))
    assert "default | ipo | clipped | plain\n" in text
    assert "\n[trainer.loss.kwargs]\n  clip = 0.2 " in text
    assert "number 0.01 to 1.0\n      parameter of the loss clipped\n      only with loss.type = clipped\n" in text
    assert "loss.kwargs" not in "\n".join(describe_keys((), "trl", keys_with(())))


THEIRS = b"""max_steps = 20
[orchestrator]
batch_size = 64
group_size = 8
[trainer.loss]
type = "custom"
import_path = "clipped_loss.clipped"  # theirs
[trainer.loss.kwargs]
clip = 0.3
"""


def test_a_config_comes_in_by_the_name_and_goes_out_by_the_path() -> None:
    offered = rules().losses
    imported = import_config(THEIRS, "rl.toml", offered)
    assert (imported.values[LOSS], imported.values[CLIP]) == ("clipped", 0.3)
    assert not [line for line in imported.report() if "import_path" in line and "->" not in line]
    config = parse(imported.train_toml("rl.toml"))
    assert edited(THEIRS, config, rules(), []).endswith(THEIRS)
    changed = edited(THEIRS, parse(set_values(config.source, {CLIP: 0.5})), rules(), []).decode()
    assert 'import_path = "clipped_loss.clipped"  # theirs\n[trainer.loss.kwargs]\nclip = 0.5\n' in changed
    assert "cannot say" not in changed
    ipo = edited(THEIRS, parse(set_values(config.source, {LOSS: "ipo", CLIP: ABSENT})), rules(), []).decode()
    assert 'type = "ipo"' in ipo
    assert "import_path" not in ipo
    assert "clip =" not in ipo.partition("\n\n")[2]
    to_own = edited(BASE, parse(set_values(BASE, {LOSS: "clipped"})), rules(), []).decode()
    assert import_config(to_own.encode(), "x", offered).values[LOSS] == "clipped"
    whole = rl_toml(effective(config, rules(), 448), 1, []).decode()
    assert 'type = "custom"\nimport_path = "clipped_loss.clipped"\n' in whole


def test_a_parameter_that_is_not_offered_is_left_out_with_its_range() -> None:
    imported = import_config(THEIRS.replace(b"clip = 0.3", b"clip = 3\nclap = 1"), "rl.toml", rules().losses)
    report = "\n".join(imported.report())
    assert "trainer.loss.kwargs.clip = 3.0 is not allowed (number 0.01 to 1.0)" in report
    assert "trainer.loss.kwargs.clap = 1.0 is not a parameter of the loss clipped" in report
    trained(imported.train_toml("rl.toml"))


def space(base: bytes) -> SearchSpace:
    config = parse(base)
    return SearchSpace.of(keys_with(rules().losses, config.get(LOSS)), config, lambda resolved: (60.0, 0.1))


def test_tpe_draws_the_loss_and_the_parameters_of_the_one_that_is_selected() -> None:
    assert not [name for name in space(SHIPPED).dimensions if "loss.kwargs" in name]
    here = space(own())
    by_name = here.dimensions
    assert by_name[LOSS].steps == ("default", "ipo", "plain")
    assert by_name[CLIP].steps == (0.0667, 0.1, 0.4, 0.6)
    assert here.places(parse(own(clip=0.2)))[CLIP] == here.places(parse(own()))[CLIP] == 0.5
    there = parse(space(own(clip=0.4)).build({LOSS: "plain"}))
    assert (there.get(LOSS), CLIP in there.values) == ("plain", False)
    start = parse(space(SHIPPED).build({LOSS: "clipped"}))
    assert not {"trainer.loss.kl_tau", "trainer.loss.ipo_threshold"} & start.values.keys()
    rng = random.Random(0)
    drawn = [here.change(rng, {name: rng.random() for name in here.dimensions}) for _ in range(60)]
    assert {value for change in drawn for value in [change.get(LOSS)]} >= {"default", "ipo", "plain"}
    for change in drawn:
        trained(here.build(change))


def test_the_brief_has_the_losses_with_their_parameters(tmp_path: Path) -> None:
    context = context_of(tmp_path, ["3e-6"])
    engine = prime_rl.PrimeRlEngine(rules(), ROOT, dict(os.environ), "none")
    own_source = own(source=context.source)
    text = compose(replace(context, rules=rules(), source=own_source, used_keys=used_keys(engine, parse(own_source))))
    assert (
        'type = "clipped" (code: losses/clipped/clipped_loss/); [trainer.loss.kwargs] may have clip = 0.2 (0.01 to 1)'
        in text
    )


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The class of a loss's inputs: prime-rl's where it can be imported. The packages of losses can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "losses/clipped"))
    name = "prime_rl.trainer.rl.loss"
    if importlib.util.find_spec("prime_rl") is None:
        for length in range(1, 5):
            monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:length]), ModuleType("stand-in"))
        vars(sys.modules[name]).update(LossInputs=SimpleNamespace, LossOutputs=SimpleNamespace)
    yield importlib.import_module(name).LossInputs
    sys.modules.pop("clipped_loss", None)


def test_the_example_is_the_clipped_objective_of_ppo(inputs: type) -> None:
    """Ratios 2, 0.5, 2, 0.5, 1.1 and one token that does not train; clip = 0.2."""
    from clipped_loss import clipped, plain

    ratios = torch.tensor([2.0, 0.5, 2.0, 0.5, 1.1, 9.0], dtype=torch.float64)
    logprobs = (ratios.log() - 3).requires_grad_()
    given = {
        "trainer_logprobs": logprobs,
        "inference_logprobs": torch.full((6,), -3.0, dtype=torch.float64),
        "ref_logprobs": None,
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0, 5.0], dtype=torch.float64),
        "loss_mask": torch.tensor([True] * 5 + [False]),
        "loss_weights": None,
    }
    result = clipped(inputs(**given), clip=0.2)
    # min(2, 1.2) + min(0.5, 0.8) + min(-2, -1.2) + min(-0.5, -0.8) + 2 x 1.1
    assert math.isclose(result.loss.item(), -(1.2 + 0.5 - 2.0 - 0.8 + 2.2))
    assert math.isclose(result.metrics["is_masked"].item(), 2 / 5, rel_tol=1e-6)
    result.loss.backward()
    # A clipped token has no gradient; of the others it is -ratio times advantage.
    assert torch.allclose(logprobs.grad, torch.tensor([0.0, -0.5, 2.0, 0.0, -2.2, 0.0], dtype=torch.float64))
    weights = torch.tensor([2.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    weighted = clipped(inputs(**given | {"loss_weights": weights}), clip=0.2)
    assert math.isclose(weighted.loss.item(), -2.4)
    assert math.isclose(plain(inputs(**given)).loss.item(), -(2 + 0.5 - 2 - 0.5 + 2.2))
    nothing = clipped(inputs(**given | {"loss_mask": torch.zeros(6, dtype=torch.bool)}), clip=0.2)
    assert (nothing.loss.item(), nothing.metrics["is_masked"].item()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (
            "import os\nimport not_there\n",
            "broken_loss/__init__.py:2: ModuleNotFoundError: No module named 'not_there'",
        ),
        ("from broken_loss import more\n", "broken_loss/more.py:2: SyntaxError: invalid syntax"),
        ("def loss(inputs):\n    ...\n", "TypeError: got an unexpected keyword argument 'clip'"),
    ],
)
def test_the_validator_names_file_and_line_of_a_loss_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, cause: str
) -> None:
    folder = tmp_path / "broken_loss"
    folder.mkdir()
    (folder / "__init__.py").write_text(source)
    (folder / "more.py").write_text("a = 1\nb = = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError) as caught:
        validate.import_loss("broken_loss.loss", {"clip": 0.2})
    [error] = validate.errors_of(caught.value)
    sys.modules.pop("broken_loss", None)
    assert error["message"].startswith(f"the loss broken_loss.loss of rules.toml: {cause}")
    explained = explain([msgspec.json.decode(json.dumps(error), type=Refusal)], own("broken").decode())
    assert explained.failure == Failure.CONFIG  # no machine is at fault: no run is tried again elsewhere
    assert re.match(r"train\.toml:\d+: trainer\.loss\.type: prime-rl refuses it: the loss broken_loss", explained.cause)

"""Attempts of an agent to get a better number without a better policy; most are marked long, the others slow.

Each is made in a throw-away checkout (checkout.py) with the real run.py, the real `nightshift night`, processes and
git. Only the process that trains is a stand-in, so that equal settings score equally and a moved number shows.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cheats import by_agent, by_files
from tests.cheats.checkout import Checkout

pytestmark = pytest.mark.timeout(1200)
QUICK = ("core.worktree", "GIT_* variables", "swapped model")
SANDBOXES = [
    pytest.param("user", marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can use another user")),
    pytest.param("bwrap", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")),
]
# What is noticed though the agent has the rights of the user.
NAMED_WITHOUT_SANDBOX = (
    "scorer of the checkout", "HEAD of the checkout", "answer that is a link to a secret",
    "link to the checkout in place of its clone", "FIFO, then link, in place of train.toml",
)  # fmt: skip


@pytest.fixture(scope="module")
def built() -> Iterator[Checkout]:
    with tempfile.TemporaryDirectory(prefix="cheats-", ignore_cleanup_errors=True) as name:  # open to other users
        checkout = Checkout(Path(name, "own"))
        checkout.build()
        yield checkout
        checkout.restore()


@pytest.fixture
def checkout(built: Checkout) -> Checkout:
    built.restore()
    return built


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=getattr(pytest.mark, "slow" if name in QUICK else "long")) for name in by_files.ATTEMPTS],
)
def test_who_may_write_in_the_checkout_is_refused_named_or_without_effect(checkout: Checkout, name: str) -> None:
    expected, act = by_files.ATTEMPTS[name]
    finding = act(checkout) or checkout.hand_in()
    assert finding.outcome == expected, finding
    assert not checkout.marker.exists(), "code of the agent ran"


@pytest.mark.long
@pytest.mark.parametrize("sandbox", SANDBOXES)
@pytest.mark.parametrize("name", by_agent.ACTIONS)
def test_an_agent_in_a_sandbox_has_no_effect_beyond_its_clone(checkout: Checkout, name: str, sandbox: str) -> None:
    finding = by_agent.act(checkout, name, sandbox)
    assert finding.outcome in ("harmless", "named"), finding
    assert not checkout.marker.exists(), "code of the agent ran"


@pytest.mark.long
@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_an_agent_in_a_sandbox_reaches_no_other_daemon(checkout: Checkout, sandbox: str) -> None:
    finding = by_agent.use_another_daemon(checkout, sandbox)
    assert finding.outcome in ("harmless", "named"), finding


@pytest.mark.long
@pytest.mark.parametrize("file", [".gitconfig", ".config/git/config"])
@pytest.mark.parametrize("name", by_agent.GIT_CONFIGURATIONS)
def test_the_configuration_of_git_in_home_has_no_effect(checkout: Checkout, name: str, file: str) -> None:
    finding = by_agent.configure_git(checkout, name, file)
    assert finding.outcome == "harmless", finding
    assert not checkout.marker.exists(), "a program of the agent ran"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMED_WITHOUT_SANDBOX)
def test_without_a_sandbox_these_are_named(checkout: Checkout, name: str) -> None:
    finding = by_agent.act(checkout, name, "none")
    assert finding.outcome == "named", finding


@pytest.mark.slow
def test_a_trick_that_works_is_seen(checkout: Checkout) -> None:
    """SECURITY.md: without a sandbox, code that the agent plants runs in the next worker."""
    finding = by_agent.act(checkout, "sitecustomize in the checkout", "none")
    assert finding.outcome == "succeeded", finding

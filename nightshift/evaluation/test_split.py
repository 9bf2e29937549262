"""The test split, which only `nightshift certify` uses.

`examples_of_test_split` is the only code that loads its examples (tests/unit/test_access.py walks the sources for
others). It does so for a job whose token stands in runs/journal.jsonl as an access: the controller adds that line
before the job's worker starts, so no access is uncounted.
"""

from pathlib import Path

from nightshift.campaign.journal import JOURNAL_NAME, Journal
from nightshift.config.rules import Rules
from nightshift.errors import EngineError
from nightshift.evaluation.environment import Task, load


def examples_of_test_split(rules: Rules, root: Path, token: str) -> list[Task]:
    """Return the examples of the test split, for a job of the last access. EngineError for any other job."""
    accesses = Journal(root / "runs").accesses()
    tokens = {access.token for access in accesses if access.number == accesses[-1].number}
    if not token or token not in tokens:
        raise EngineError(f"the journal ({JOURNAL_NAME}) holds no access to the test split for this job")
    environments = load(root, rules.environments)
    return [(environment, example) for environment in environments for example in environment.examples("test")]

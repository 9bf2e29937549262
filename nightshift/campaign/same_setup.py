"""What the first experiment of a campaign fixes for all that follow."""

from collections.abc import Mapping, Sequence

from nightshift.campaign.git import Head
from nightshift.campaign.records import Record
from nightshift.errors import UsageError

# What a worker gets of your environment and trains otherwise by: a record names them, a campaign keeps them.
FIXED_VARIABLES = ("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def fixed_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of FIXED_VARIABLES that are set to something."""
    return {name: environ[name] for name in FIXED_VARIABLES if environ.get(name)}


def baseline_of(records: Sequence[Record], head: Head) -> Record | None:
    """The first experiment that was kept on a campaign's branch: it fixes engine, rules and hardware."""
    return next((r for r in records if head.is_campaign and r.branch == head.branch and r.is_keep), None)


def differences(
    first: Record, engine: str, rules_hash: str, hardware: str, variables: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """Why a run here would not compare with those of `first`: what differs, what it was then, what it is now."""
    fixed = (
        ("engine", first.engine, engine),
        ("rules", first.rules_hash, rules_hash),
        ("hardware", first.hardware, hardware),
        *((name, first.versions.get(name, ""), variables.get(name, "")) for name in FIXED_VARIABLES),
    )
    return [(what, then, now) for what, then, now in fixed if then != now]


def require_same_setup(
    first: Record, engine: str, rules_hash: str, hardware: str, variables: Mapping[str, str]
) -> None:
    """Refuse a run that would not compare with the campaign it is in. Raises UsageError with the reason."""
    fix = "Start a new branch autoresearch/<tag> for it, or go back to what the campaign uses."
    for what, then, now in differences(first, engine, rules_hash, hardware, variables):
        cause = f"campaign {first.branch} uses {what} {then or 'unset'} since its first experiment, this is"
        raise UsageError(f"{cause} {now or 'unset'}", fix)

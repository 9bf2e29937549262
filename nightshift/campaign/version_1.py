"""Records of Nightshift 0.1.0, read for ever: shown, compared, reported and replayed, never continued."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nightshift.decision_rules import DecisionRules

FINISH = "Finish it with Nightshift 0.1.0"
_OF_A_RUN = ("seed", "training", "evaluation", "startup_seconds", "total_seconds")
# One world, and kinds of ideas in it.
_RULES = DecisionRules(
    kinds=((0.7, 0.6), (0.0, 0.15), (-1.5, 1.5), (-6.0, 10.0)),
    priors=((1.0, (0.27, 0.33, 0.36, 0.04)),),
    noises=((1.0, 1.0),),
    calibration=0.9,
    shrinkage=(0.0, 1.0),
)
# Its constants by the names of its rules; what else they held decided nothing that was ever recorded.
DECISION = {
    "gsm8k-prime-rl": _RULES,
    "gsm8k-trl": _RULES,
    "arithmetic-trl": replace(_RULES, prior_sd=0.08, seed_sd=0.02, take_back=0.008),
}


def from_version_1(data: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a version 1 record as one of today's. ValueError, KeyError or TypeError where it is none.

    Experiments are in the order of their numbers. One that holds a run of the incumbent is shown and not folded: its
    verdict came from a comparison that is no longer made.
    """
    name = data["rules_name"]
    if name not in DECISION:
        raise ValueError(f"its rules {name!r} are none of Nightshift 0.1.0")
    is_replicated = any(run["side"] != "candidate" for run in data["runs"])
    is_decided = data["judgement"] is not None and data["failure"] not in ("machinery", "interrupted")
    notes = [*data.get("notes", ())]
    if is_replicated:
        notes.append("holds a run of the incumbent, as version 1 could make: shown, not folded into the campaign")
    of_all = {"attempt": None, "hardware": data["hardware"], "versions": data["versions"]}
    runs = [{key: run[key] for key in _OF_A_RUN} | of_all for run in data["runs"] if run["side"] == "candidate"]
    decided = data["number"] if is_decided and not is_replicated else None
    return {**data, "runs": runs, "notes": notes, "decided": decided, "decision": DECISION[name]}

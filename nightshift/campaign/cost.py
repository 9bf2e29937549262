"""What a campaign cost, as its records tell: hours of runs and GPUs, what its agents took. Not told is None."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import reduce

from nightshift.campaign.ledger import Ledger
from nightshift.cost import NO_BILL, Bill
from nightshift.files import read_json
from nightshift.records import Record, Result

STATE_NAME = "night.json"  # the last night's; see night/state.py
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Spent:
    """`run_seconds`: wall-clock of all runs that came back, one after the other though some may have run side by side;
    `gpu_seconds`: that times the GPUs that each had, None where none had any. `agents`: of all that were asked."""

    run_seconds: float | None = None
    gpu_seconds: float | None = None
    agents: Bill = NO_BILL

    def __str__(self) -> str:
        """One line: `1.2 h of runs, 2.4 GPU-hours; 5 proposals: 0.3 h, 120,345 tokens in, 4,321 out, $1.23`."""
        machine = [] if self.run_seconds is None else [f"{self.run_seconds / _HOUR:.2f} h of runs"]
        machine += [] if self.gpu_seconds is None else [f"{self.gpu_seconds / _HOUR:.2f} GPU-hours"]
        parts = [", ".join(machine), _told(self.agents) if self.agents.num_proposals else ""]
        return "; ".join(filter(None, parts)) or "nothing yet"


@dataclass(frozen=True, slots=True)
class Paid:
    """What the agents of a campaign cost up to experiment `first`, refused proposals too: the next night's file says it
    of the nights before."""

    branch: str
    rules_hash: str
    first: int
    bill: Bill = NO_BILL


@dataclass(frozen=True, slots=True)
class _Night(Paid):
    """What night.json says of that: the bill is of all proposals since experiment `first`; `earlier`: of nights before,
    at most one of a campaign."""

    earlier: tuple[Paid, ...] = ()


def spent(ledger: Ledger, records: Iterable[Record]) -> Spent:
    """What these experiments of one campaign cost, with the proposals that its nights refused. UsageError where the
    last night's file is damaged."""
    records, night = list(records), _night(ledger)
    whose = {(record.branch, record.rules_hash) for record in records}
    return cost_of(records, None if night is None else _paid(night, whose, records))


def paid_until(first: int, ledger: Ledger) -> tuple[Paid, ...]:
    """What the nights so far have cost, by campaign: for the file of the one that begins with experiment `first`, which
    takes the place of the last one's. UsageError where that is damaged."""
    if (night := _night(ledger)) is None:
        return ()
    whose = (night.branch, night.rules_hash)
    ours = [record for record in ledger.records() if (record.branch, record.rules_hash) == whose]
    others = (paid for paid in night.earlier if (paid.branch, paid.rules_hash) != whose)
    return (*others, Paid(*whose, first, _paid(night, {whose}, ours)))


def _night(ledger: Ledger) -> _Night | None:
    return read_json(ledger.runs_dir / STATE_NAME, _Night, "Delete it: the next night starts anew.")


def _paid(night: _Night, whose: AbstractSet[tuple[str, str]], records: Iterable[Record]) -> Bill:
    """What a campaign's agents cost: as nights tell it, and the records where none does."""
    known = [paid for paid in night.earlier if (paid.branch, paid.rules_hash) in whose][-1:]
    since, until = known[0].first if known else 0, math.inf
    bills = [paid.bill for paid in known]
    if (night.branch, night.rules_hash) in whose:
        until = night.first
        bills.append(night.bill)
    bills.append(cost_of(record for record in records if since <= record.number < until).agents)
    return reduce(Bill.and_of, bills, NO_BILL)


def own_runs(record: Record) -> tuple[Result, ...]:
    """Those that it took over from another were made, and paid, before it: see baseline.py."""
    return record.runs if record.baseline is None else ()


def cost_of(records: Iterable[Record], agents: Bill | None = None) -> Spent:
    """What these experiments cost. `agents`: what all that were asked cost, where more is known than the records hold,
    which have the proposals that were taken only. Runs that an experiment took over from another are not counted."""
    records = list(records)
    runs = [(run.total_seconds, gpus_of(r.hardware)) for r in records for run in own_runs(r)]
    if agents is None:
        agents = reduce(Bill.plus, (record.cost for record in records), NO_BILL)
    on_gpus = [seconds * gpus for seconds, gpus in runs if gpus is not None]
    return Spent(sum(s for s, _ in runs) if runs else None, sum(on_gpus) if on_gpus else None, agents)


def gpus_of(hardware: str) -> int | None:
    """How many GPUs a run had, by what its record says of them: `2 x NVIDIA H100 80GB HBM3, 2 side by side, 8 cores
    each`, `A + B`. None where it had none, or nobody said."""
    if found := re.match(r"(\d{1,3}) x ", hardware):
        return int(found[1])
    return hardware.count(" + ") + 1 if " + " in hardware else None


def _told(agents: Bill) -> str:
    """`5 proposals: ...`; what no program told is said to be missing."""
    total, num = agents.total, agents.num_proposals
    parts = [] if total.seconds is None else [f"{total.seconds / _HOUR:.2f} h"]
    if total.tokens_in is None and total.tokens_out is None:
        parts.append("tokens not told")
    else:
        parts.append("? tokens in" if total.tokens_in is None else f"{total.tokens_in:,} tokens in")
        parts[-1] += _mark(total.tokens_in, agents.num_in, num)
        parts.append("? out" if total.tokens_out is None else f"{total.tokens_out:,} out")
        parts[-1] += _mark(total.tokens_out, agents.num_out, num)
    parts.append("dollars not told" if total.dollars is None else f"${total.dollars:,.2f}")
    parts[-1] += _mark(total.dollars, agents.num_priced, num)
    return f"{num:,} proposal{'' if num == 1 else 's'}: {', '.join(parts)}"


def _mark(figure: float | None, num_told: int, num: int) -> str:
    """That it was more: of so many of the `num` proposals alone all of it was told."""
    if figure is None or num_told >= num:
        return ""
    return f" (told of {num_told:,})" if num_told else " (told in part)"

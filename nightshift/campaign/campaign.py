"""A campaign: the decided experiments of one branch under one set of rules, folded into what is believed of them.
Recomputed from the records at every start. Only `Campaign.step` changes a belief.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np
from msgspec import structs

from nightshift.campaign import decision
from nightshift.campaign.decision import Tested
from nightshift.campaign.records import Action, Change, Decision, Judgement, Record, Verdict
from nightshift.campaign.scores import Form, compare, extra_variance, remark, remarks, run_scores, without
from nightshift.campaign.standing import Expected, Standing, effect_at_decision, fresh, standing_of, supports
from nightshift.campaign.worlds import UNUSED, Posterior
from nightshift.config.train_toml import changes_of, keys_of
from nightshift.errors import UsageError


@dataclass(frozen=True, slots=True)
class Idea:
    """`keys` of train.toml, with the values of its experiment's; none where they are not known, and it joins no set.
    `replaced`: ideas of which it took the place, because it sets a key of theirs; their other keys are its own then."""

    keys: frozenset[str]
    replaced: frozenset[int] = frozenset()

    def over(self, held: Mapping[int, Idea]) -> Idea:
        """The same, tried on a config that held these."""
        gone = {number: idea for number, idea in held.items() if idea.keys & self.keys}
        keys = self.keys.union(*(idea.keys for idea in gone.values()))
        return Idea(keys, frozenset(gone).union(*(idea.replaced for idea in gone.values())))


def is_set(ideas: Mapping[int, Idea], numbers: Collection[int] | None) -> bool:
    """Whether these are remembered, and can stand in one file: each sets keys, and no two the same."""
    found = [ideas[number].keys for number in numbers or () if number in ideas]
    is_whole = numbers is not None and len(found) == len(numbers) and all(found)
    return is_whole and len(frozenset().union(*found)) == sum(map(len, found))


def difference(own: Collection[int], ideas: Collection[int] | None) -> str:
    """In words, how a set of ideas differs from a config's own; empty where it does not, or is not known."""
    if ideas is None:
        return ""
    changes = {"less": {*own} - {*ideas}, "plus": {*ideas} - {*own}}
    return " ".join(f"{word} {number:04d}" for word, numbers in changes.items() for number in sorted(numbers))


@dataclass(frozen=True, slots=True, eq=False)
class Campaign:
    """A fold over the ledger in the order of decisions. `kept`: in the order of the belief's configs, the baseline
    first; `incumbent`: the experiment whose config is believed best; both are empty before the baseline. `ideas`: those
    that the belief remembers, by the number of the experiment that they came with."""

    decided: tuple[Record, ...] = ()
    kept: tuple[Record, ...] = ()
    belief: Posterior | None = None
    incumbent: Record | None = None
    ideas: Mapping[int, Idea] = field(default_factory=dict)
    standings: tuple[Standing | None, ...] = ()  # what was believed after each of `decided`
    last_expected: Mapping[int, Expected] = field(default_factory=dict)  # of what cannot be told any more

    @classmethod
    def of(cls, records: Sequence[Record], branch: str, rules_hash: str) -> Campaign:
        """The campaign of one branch and rules hash, as its records tell it. UsageError for scores that fit nothing."""
        return reduce(cls.step, ordered(records, branch, rules_hash), cls())

    def step(self, record: Record) -> Campaign:
        """The campaign after one more decided experiment, a child of `record.parent`. UsageError as `test` says."""
        campaign = self._stepped(record)
        last = {**self.last_expected, **last_expected(self, campaign)}
        return replace(campaign, standings=(*self.standings, campaign.standing), last_expected=last)

    def _stepped(self, record: Record) -> Campaign:
        campaign = replace(self, decided=(*self.decided, record))
        if record.status == Verdict.CRASH or (self.belief is None and not record.is_keep):
            return campaign  # in the second case the baseline's record was taken away, and what this was compared with
        if self.belief is None:
            scores = run_scores(record)
            mean, spread = scores.mean(), scores.var()
            # As many examples, scored 0 or 1, as would make the mean vary as these do: several environments, games.
            is_plain = spread == 0 or np.isin(scores, (0.0, 1.0)).all()
            size = len(scores) * (1.0 if is_plain else float(mean * (1 - mean) / spread))
            belief = decision.baseline(mean, size, record.decision_rules, extra_variance(record))
            belief = replace(belief, ideas=np.array([record.number]))
            return replace(campaign, kept=(record,), belief=belief, incumbent=record)
        belief = decision.settle(self.test(record), record.is_keep, record.decision_rules)
        kept = (*self.kept, record) if record.is_keep else self.kept
        ideas = {**self.ideas, record.number: self._idea_of(record, self._made_from(record))}
        ideas = {int(number): ideas[number] for number in belief.ideas[1:]}
        return replace(campaign, kept=kept, belief=belief, incumbent=kept[int(belief.incumbent)], ideas=ideas)

    def test(self, record: Record) -> Tested:
        """The belief after the record's run, see decision.py. UsageError for other examples than its parent's."""
        assert self.belief is not None
        parent = self._index_of(record.parent)
        candidate, before = run_scores(record), run_scores(self.kept[parent])
        if len(candidate) != len(before):
            cause = f"experiment {record.number:04d} has {len(candidate)} scores, its parent {len(before)}"
            raise UsageError(cause, without(record))
        if len(record.decision_rules.priors) * len(record.decision_rules.noises) != len(self.belief.weights):
            cause = f"experiment {record.number:04d} has other priors and noises than its campaign's first"
            raise UsageError(cause, without(record))
        made_from = self._made_from(record)
        replaced = [*made_from & self._idea_of(record, made_from).replaced]
        is_new = self.is_new(record)
        rules, numbers = record.decision_rules if is_new else record.decision_rules.of_a_repeat, self.belief.ideas
        return decision.observe(
            self.belief,
            parent,
            float(candidate.mean()),
            decision.pairing(candidate, before),
            rules,
            extra_variance(record),
            made_from=np.isin(numbers, [int(numbers[0]), *made_from]).astype(float),
            replaced=np.isin(numbers, replaced if is_new else ()).astype(float),
            number=record.number if is_new else UNUSED,
        )

    def ideas_of(self, kept: Record) -> frozenset[int]:
        """What a kept config is made of: the numbers of the experiments that its ideas came with."""
        if self.belief is None:
            return frozenset()
        chosen = self.belief.set_of(self._index_of(kept.number))
        return frozenset(int(number) for number in self.belief.ideas[1:][chosen[1:] > 0])

    def _made_from(self, record: Record) -> frozenset[int]:
        """The ideas of the config that a record's idea was tried on; of its parent's, where that cannot be told."""
        if self.is_repeat(record) or not is_set(self.ideas, record.proposal.base):
            return self.ideas_of(self.kept[self._index_of(record.parent)])
        return frozenset(record.proposal.base or ())

    def _idea_of(self, record: Record, made_from: frozenset[int]) -> Idea:
        """The record's own, whose keys are not known where what it was tried on is not."""
        is_known = record.proposal.base is None or is_set(self.ideas, record.proposal.base)
        own = Idea(keys_of(record.diff) if is_known else frozenset())
        return own.over({number: self.ideas[number] for number in made_from})

    def beside(self, record: Record) -> str:
        """How what a record's idea was tried on differed from its parent; empty where it did not."""
        parent = next((kept for kept in self.kept if kept.number == record.parent), None)
        return "" if parent is None else difference(self.ideas_of(parent), record.proposal.base)

    def is_repeat(self, record: Record) -> bool:
        """True for one more run of its parent: what the engine runs is the same, so there is nothing to keep."""
        parent = self._parent_of(record)
        return parent is not None and record.effective_hash == parent.effective_hash

    def is_new(self, record: Record) -> bool:
        """True if it measures a change of its own: neither its parent nor a set of earlier changes again."""
        return not self.is_repeat(record) and (record.proposal.base is None or bool(record.diff))

    def judge(self, record: Record) -> Record:
        """A measured experiment with its verdict and judgement."""
        if self.belief is None:
            baseline = Decision(change=Change(experiment=record.number), action=Action.KEEP)
            score = float(run_scores(record).mean())
            judgement = Judgement(why="baseline", decisions=(baseline,), incumbent_score=score)
            return structs.replace(record, status=Verdict.KEEP, judgement=judgement)
        tested = self.test(record)
        judgement = self._numbers(record, tested)
        judgement = structs.replace(judgement, decisions=self._decisions(record, tested, judgement.taken_back_to))
        verdict = Verdict.KEEP if tested.keep else Verdict.DISCARD
        return structs.replace(record, status=verdict, judgement=judgement)

    def _numbers(self, record: Record, tested: Tested) -> Judgement:
        """Why a candidate is kept or not, with the numbers of the rule."""
        parent, numbers = self.kept[self._index_of(record.parent)], [record.number for record in self.kept]
        is_repeat, scores = self.is_repeat(record), run_scores(parent)
        found = decision.judge(tested, run_scores(record), scores, numbers, record.decision_rules, is_repeat)
        if is_repeat:
            return found
        why, learnt = found.why, self.form(record)
        if beside := self.beside(record):
            why += f", tried on that {beside}"
        if tested.keep and found.p_better is not None:
            why += f": {fresh(found.p_better)}"
        if learnt and learnt.conclusion:
            why += f"; {learnt.conclusion}"
        return structs.replace(found, why=why)

    def _decisions(self, record: Record, tested: Tested, taken_back_to: int | None) -> tuple[Decision, ...]:
        """One for each change that the run measured, the experiment's own first, and for each that joins or leaves."""
        assert self.incumbent is not None
        made_from, parent = self._made_from(record), self.ideas_of(self.kept[int(tested.parent)])
        own = {record.number} if self.is_new(record) else set[int]()
        replaced = self._idea_of(record, made_from).replaced if own else frozenset[int]()
        records = {each.number: each for each in (*self.decided, record)}
        before = after = self.ideas_of(self.incumbent)
        if tested.keep:
            after = made_from - replaced | own
        elif taken_back_to is not None:
            after = self.ideas_of(records[taken_back_to])
        measured, moved = own | (made_from - parent - replaced), before ^ after
        if tested.keep:
            moved -= replaced  # their keys are the own change's now
        decisions = []
        for number in sorted(measured | moved, key=lambda n: (n not in own, n)):
            if number in before & after:
                continue  # another experiment brought this change in meanwhile
            if number in after:
                action = Action.KEEP if number in own else Action.ADOPT
            else:
                action = Action.REVERT if number in before else Action.DISCARD
            ideas, others = tested.belief.ideas, [*replaced & made_from] if number in own else []
            effect, sd = tested.belief.of(np.isin(ideas, [number]).astype(float) - np.isin(ideas, others))
            keys = _values(records[number])
            first = next((each.number for each in self.decided if keys and _values(each) == keys), number)
            change = Change(experiment=first, keys=keys)
            decisions.append(Decision(change=change, action=action, effect=float(effect), effect_stderr=float(sd)))
        return tuple(decisions)

    def form(self, record: Record) -> Form | None:
        """What a measured experiment learnt of the form beside its parent, see `scores.Form`."""
        parent = self._parent_of(record)
        return compare(record, parent) if parent else None

    def remarks(self, record: Record) -> list[str]:
        """What the verdict on a measured experiment does not say: load, gains in form, environments that fall."""
        form, busy = self.form(record), remark(record)
        lines = [busy] if busy else []
        lines += [str(form)] if form and form.conclusion else []
        return lines + remarks(record, self._parent_of(record))

    def _parent_of(self, record: Record) -> Record | None:
        """What it is compared with; None before the baseline."""
        return self.kept[self._index_of(record.parent)] if self.kept else None

    def _index_of(self, number: int | None) -> int:
        """Of a kept experiment in the belief; of the incumbent, if that record is gone."""
        numbers = [record.number for record in self.kept]
        return numbers.index(number if number in numbers else self.incumbent.number) if self.incumbent else 0

    @property
    def standing(self) -> Standing | None:
        """What is believed now; None before the baseline."""
        rules = self.incumbent.decision_rules if self.incumbent else None
        return standing_of(self.belief, rules, len(self.decided)) if self.belief and rules else None

    @property
    def parts(self) -> frozenset[int]:
        """Experiments that the incumbent holds the ideas of, or of whose ideas these took the place; and itself."""
        if self.incumbent is None:
            return frozenset()
        ideas = self.ideas_of(self.incumbent)
        return ideas.union({self.incumbent.number}, *(self.ideas[number].replaced for number in ideas))

    @property
    def lineage(self) -> tuple[Record, ...]:
        """The baseline and the keeps that the incumbent stands on, in order."""
        parts = self.parts
        return tuple(record for record in self.kept if record.number in parts or record is self.kept[0])

    @property
    def taken_back(self) -> tuple[Record, ...]:
        """The keeps that are not part of the incumbent (any more), in order."""
        standing = {record.number for record in self.lineage}
        return tuple(record for record in self.kept if record.number not in standing)

    @property
    def since(self) -> dict[int, str]:
        """What became of each keep by now, by its number: taken back, or what standing.py says."""
        gone: dict[int, str] = {record.number: "taken back" for record in self.taken_back}
        return gone | (supports(self.belief, self.kept, self.lineage, self.decided) if self.belief else {})

    def tried(self, config_hash: str) -> Record | None:
        """The last experiment that decided this config."""
        return next((record for record in reversed(self.decided) if record.config_hash == config_hash), None)

    def seeds_of(self, effective_hash: str) -> set[int]:
        """Those of the runs of the same settings so far that told something."""
        same = (record for record in self.decided if record.effective_hash == effective_hash)
        return {record.result.seed for record in same if record.result and record.result.evaluation}


def _values(record: Record) -> dict[str, str | None]:
    """The keys that an experiment's own change sets, with their new values; None for a key that was taken out."""
    return {change.key: None if change.kind == "removed" else change.new for change in changes_of(record.diff)}


def ordered(records: Sequence[Record], branch: str, rules_hash: str) -> list[Record]:
    """The decided experiments of one branch and rules hash, in the order of their decisions."""
    ours = [r for r in records if r.decided is not None and (r.branch, r.rules_hash) == (branch, rules_hash)]
    return sorted(ours, key=lambda record: record.decided or 0)


def expected(campaign: Campaign, record: Record) -> Expected | None:
    """Candidate less parent as believed now; as believed last if an idea of it was forgotten as clearly worse."""
    then, belief, own = effect_at_decision(record), campaign.belief, campaign.ideas.get(record.number)
    places = [place for place, kept in enumerate(campaign.kept) if kept.number == record.parent]
    if then is None or belief is None:
        return then
    made_from = campaign.ideas_of(campaign.kept[places[0]]) if places else frozenset[int]()
    made_from = made_from if record.proposal.base is None else frozenset(record.proposal.base)
    is_known_set = record.proposal.base is not None and not record.diff  # one run again: no idea of its own
    if not places or not made_from <= campaign.ideas.keys() or (own is None and not is_known_set):
        return campaign.last_expected.get(record.number, then)
    ideas = made_from if own is None else made_from - own.replaced | {record.number}
    candidate = np.isin(belief.ideas, [int(belief.ideas[0]), *ideas])
    mean, sd = belief.of(candidate - belief.set_of(places[0]))
    return Expected(float(mean), float(sd))


def last_expected(before: Campaign, after: Campaign) -> dict[int, Expected]:
    """Of the experiments that one step made impossible to tell, what was believed before it."""
    gone = before.ideas.keys() - after.ideas.keys()
    records = [r for r in before.decided if r.number in gone or gone & {*(r.proposal.base or ())}] if gone else []
    found = {record.number: expected(before, record) for record in records}
    return {number: each for number, each in found.items() if each is not None}

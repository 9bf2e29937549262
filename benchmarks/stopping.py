"""What the rewards of made-up runs foretell, for nights that stop what is hopeless (proposers.py --early-stop)."""

from __future__ import annotations

import json

import numpy as np
from machine import RESULTS

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.hopeless import comparable, is_spared, least_reward
from nightshift.foretelling import Forecast, Foretelling, Rung
from nightshift.records import Record
from nightshift.train_toml.config import Config


class Stopping:
    """Of one night: what the harness takes rewards to foretell, as fitted, and what they do: a bootstrap of that."""

    def __init__(self, seed: int) -> None:
        fitted = json.loads((RESULTS / "early_stop.json").read_text())
        self._rng = np.random.default_rng((seed, 8))
        draw = int(self._rng.integers(len(fitted["bootstraps"][0])))
        self._foretellings = [Foretelling(**each) for each in fitted["foretellings"]]
        self._true = [Foretelling(**draws[draw]) for draws in fitted["bootstraps"]]
        self._correlation = fitted["error_correlation"]

    def forecast(self, campaign: Campaign, record: Record, config: Config, parent: Config) -> Forecast | None:
        """Of a run that is hopeless, given what it would score at its end; None where it goes on."""
        assert campaign.belief is not None
        shared, *own = self._rng.normal(0, 1, 3)
        factor = comparable(config, parent)
        kept = next(kept for kept in campaign.kept if kept.number == record.parent)
        final = (record.score or 0.0) - (kept.score or 0.0)
        for foretelling, true, alone in zip(self._foretellings, self._true, own, strict=True):
            z = self._correlation**0.5 * shared + (1 - self._correlation) ** 0.5 * alone
            reward = 0.5 + true.growth * (final + true.sd * z)
            if factor is None or record.effective_hash == kept.effective_hash or is_spared(record):
                continue
            rung = Rung(foretelling, 0.5, 0.0, factor)
            if reward < least_reward(campaign, record, rung):
                return rung.forecast(reward)
        return None

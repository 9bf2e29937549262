"""What a night knows at any moment, and puts on disk at once: its state, and what its records say."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.closing import resume
from nightshift.errors import Interrupted
from nightshift.files import write_atomically, write_json
from nightshift.night.state import NightState, Pending, decided, lesson_of, save
from nightshift.night.text import SUMMARY_NAME, summary
from nightshift.records import Record
from nightshift.setup import Setup

PROPOSAL_NAME = "proposal.json"  # beside record.json: who proposed what, and what it did besides


class Memory:
    """The state of a night under way beside the ledger it fills."""

    def __init__(self, state: NightState, setup: Setup) -> None:
        self.state = state
        self._setup = setup

    def update(self, **changes: Any) -> None:
        """Change the state, on disk too."""
        self.state = replace(self.state, **changes)
        save(self._setup.ledger, self.state)

    def do(self, what: str) -> None:
        """Say for `nightshift status` what the night does now."""
        self.update(doing=what, doing_since=self._setup.now().isoformat(timespec="seconds"))

    def own(self) -> list[Record]:
        """The closed experiments of this night."""
        return self.state.own(self._setup.ledger.records())

    def campaign(self) -> Campaign:
        """The campaign that this night goes on with."""
        return self._setup.campaign(self.state.branch)

    def attempts(self, pending: Pending) -> list[Record]:
        """Experiments that ran this very proposal."""
        source, ledger = pending.source.encode(), self._setup.ledger
        return [r for r in self.own() if r.number >= pending.number and ledger.source(r.number) == source]

    def tidy(self, is_end: bool = False) -> None:
        """Close what was cut off; complete the records with what was said about them; forget what is decided."""
        setup, pending = self._setup, self.state.pending
        with setup.ledger.lock():
            resume(setup.ledger, setup.repo, setup.reporter.note)
            attempts = self.attempts(pending) if pending else []
            for record in attempts:
                path = setup.ledger.run_dir(record.number) / PROPOSAL_NAME
                if pending and not path.exists():
                    write_json(path, {"agent": self.state.request.agent, **asdict(pending)})
            # The last one waits for the lesson that the agent's next brief asks for.
            own = decided(self.own())
            for record in own if is_end else own[:-1]:
                if record.lesson is None:
                    setup.ledger.write(replace(record, lesson=lesson_of(record)))
        if decided(attempts):
            self.update(pending=None, num_given_up=0)

    def summarise(self) -> str:
        """The night's summary, written beside the morning page."""
        setup = self._setup
        text = summary(self.state, self.own(), self.campaign(), setup.now())
        write_atomically(setup.ledger.runs_dir / SUMMARY_NAME, text.encode() + b"\n")
        self._write_page()
        return text

    def _write_page(self) -> None:
        from nightshift.report.page import write_report  # jinja2 and matplotlib load with the first page

        try:
            write_report(self._setup.root, self._setup.now(), branch=self.state.branch)
        except Interrupted:
            raise
        except Exception as error:  # whatever it is, a page that cannot be written does not end the night
            self._setup.reporter.note(f"the page cannot be written: {type(error).__name__}: {error}")

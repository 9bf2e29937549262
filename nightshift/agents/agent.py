"""Asks a coding agent for the next train.toml: any program that reads a prompt and edits files.

Each proposal is a fresh process with a bounded brief, in a throw-away clone (clone.py), in a sandbox where this machine
has one (sandbox.py), as a process group that leaves nothing behind (executors/process.py). Taken over are its
train.toml, if that is a regular file of sane size, a few lines of text (hypothesis, prediction, the lessons of decided
experiments), and notes for its next call. Asked for several proposals it writes proposal-1.toml and proposal-1.txt, and
so on. Whatever else it did in its clone is named in the notes of the record.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import structs

from nightshift.agents.availability import Availability, Meaning, read_ending, read_live
from nightshift.agents.base import Answer, Context, Proposing
from nightshift.agents.brief import MAX_GRID, compose, logs, save_notes
from nightshift.agents.clone import ANSWER_NAME, Clone, proposal_files
from nightshift.agents.notebook import parse_answer
from nightshift.agents.presets import PRESETS, PROMPT_FILE, command_of, login_of
from nightshift.agents.sandbox import Sandbox, choose
from nightshift.agents.usage import Log, summary_of
from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.records import NO_SANDBOX, Cost, Proposal
from nightshift.config.train_toml import read_source
from nightshift.engines.base import ALL, Check
from nightshift.errors import ConfigError, NightshiftError
from nightshift.executors.process import Child, ProcessGroup
from nightshift.files import open_regular, write_atomically
from nightshift.waiting import waiting

_MAX_ANSWER = 64 * 1024  # bytes that are read of an answer
_READY = re.compile(r"\bready\b", re.IGNORECASE)
_QUESTION = "This asks whether you can be reached. Change no file; answer with one word: ready\n"
_QUESTION_SECONDS = 240.0  # Claude Code tries a wrong key again for 175 s
_TICK_SECONDS = 0.2  # between two looks at an agent that is asked one question
GRACE_SECONDS = 5.0

Work = Generator[None, bool | None, Any]  # as Proposing: yields while a program works; sending True stops it


def complete(work: Work) -> Any:
    """Run a generator of this module to its end, and wait meanwhile. Returns its value."""
    try:
        while True:
            next(work)
            time.sleep(_TICK_SECONDS)
    except StopIteration as end:
        return end.value
    finally:
        work.close()


def open_agent(
    name: str,
    sandbox: str,
    root: Path,
    environ: Mapping[str, str],
    timeout_seconds: float,
    clone: Clone,
    agent_env: Sequence[str] = (),
    agent_sees: Sequence[str] = (),
    model: str | None = None,
    effort: str | None = None,
) -> Agent:
    """Return the agent that is called `name`, in the sandbox that `sandbox` asks for. UsageError if that does not work.

    `agent_env`, `agent_sees`: more variables of `environ` that it gets, more files and folders that it may read.
    `model`, `effort`: --agent-model, --agent-effort.
    """
    login = login_of(name, environ, agent_env, agent_sees)
    contained = command_of(name, is_contained=True, model=model, effort=effort)
    chosen = choose(sandbox, contained, login, root, environ, clone)
    command = command_of(name, model=model, effort=effort) if chosen.name == NO_SANDBOX else contained
    return Agent(
        name if name in PRESETS else Path(command[0]).name,
        command,
        timeout_seconds,
        clone,
        chosen,
        settings=tuple(filter(None, (model, effort))),
    )


def agent_environment(base: Mapping[str, str], clone: Path) -> dict[str, str]:
    """Return `base` without the variables that point git or a shell at another place than the clone."""
    kept = {name: value for name, value in base.items() if not name.startswith("GIT_") and name != "OLDPWD"}
    # Should it delete .git, git must not find another repository further up.
    return {**kept, "PWD": str(clone), "GIT_CEILING_DIRECTORIES": str(clone.parent), "GIT_TERMINAL_PROMPT": "0"}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process of an agent ended."""

    cause: str | None  # what went wrong, with the last words; None if nothing did
    exit_code: int | None  # None if it was stopped
    output: str  # the end of it
    words: str  # its last words
    cost: Cost
    notes: tuple[str, ...]
    live: Availability | None  # why it was stopped: it waited for something itself
    is_stopped: bool = False  # the night ended

    @property
    def is_killed(self) -> bool:
        """True if nightshift or a signal ended it: bwrap and shells end with 128 + the signal."""
        return self.cause is not None and (self.exit_code is None or not 0 < self.exit_code <= 128)

    def availability(self, *, is_edited: bool = False) -> Availability:
        """Return why the process left no proposal."""
        availability = self.live or read_ending(self.output, self.exit_code, is_edited=is_edited)
        if availability.is_away and (self.live or self.exit_code is not None):
            return availability
        return replace(availability, text=self.cause or f"its last words: {self.words or 'none'}")


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent's command, run in a clone and in a sandbox."""

    name: str
    command: tuple[str, ...]
    timeout_seconds: float
    clone: Clone
    sandbox: Sandbox
    clock: Callable[[], float] = time.monotonic
    settings: tuple[str, ...] = ()  # model and effort

    @property
    def title(self) -> str:
        """Its name with its model and effort: `claude (opus, high)`."""
        return self.name + (f" ({', '.join(self.settings)})" if self.settings else "")

    def run(self, source: bytes, prompt: str, log_path: Path, logs: Mapping[str, bytes] = MappingProxyType({})) -> Work:
        """Run one process from start to end, in a fresh clone with `source` as its train.toml and the files of `logs`.
        The caller clears the clone. Returns the Ending."""
        group = ProcessGroup(f"agent-{uuid.uuid4().hex}", GRACE_SECONDS)
        began, credential, notes, cause, live = self.clock(), None, tuple[str, ...](), None, None
        is_stopped = False
        log_path.unlink(missing_ok=True)
        log_path.touch(mode=0o600, exist_ok=False)  # what agents print may hold secrets
        with log_path.open("r+b") as file:
            log = Log(file)
            try:
                self.clone.open(source, logs)
                credential = self.sandbox.furnish(self.clone)
                child = self._start(group, prompt, log_path)
                while child.poll() is None and cause is None:
                    if (yield):
                        cause, is_stopped = "stopped with the night", True
                    elif self.clock() - began >= self.timeout_seconds:
                        cause = f"no end after {self.timeout_seconds:g} s: stopped"
                    elif live is not None:
                        cause = f"stopped: {live.text}"
                    group.check()
                    log.cut()
                    live = read_live(log.end)
            finally:  # also if nothing was started: what git might start, should somebody find a way, ends as well
                survivors = [*group.stop(), *self.sandbox.end()]
                if not survivors:  # also when the night is stopped now: a token may be renewed
                    home, environ = self.clone.folder / "home", self.sandbox.environ
                    notes = self.sandbox.login.take_back(environ, home, credential)
            log.cut()
        words, cost = summary_of(log.end)
        exit_code = None if cause or survivors else child.poll()
        if survivors:
            cause = f"could not be stopped: {', '.join(survivors)}"
        elif exit_code != 0:
            cause = (cause or child.exit_cause()) + (f"; its last words: {words}" if words else "")
        cost = structs.replace(cost, seconds=max(self.clock() - began, 0.0))
        return Ending(cause, exit_code, log.end, words, cost, notes, live, is_stopped)

    def _start(self, group: ProcessGroup, prompt: str, log_path: Path) -> Child:
        """Start the program, with the prompt on stdin or in a file."""
        write_atomically(self.clone.prompt, prompt.encode())
        words = [word.replace(PROMPT_FILE, str(self.clone.prompt)) for word in self.command]
        has_file = words != list(self.command)
        words, environment = self.sandbox.enclose(words, self.clone)
        options: dict[str, Any] = {"env": agent_environment(environment, self.clone.path), "cwd": self.clone.path}
        with self.clone.prompt.open("rb") as stdin:
            return group.start("agent", words, log_path=log_path, stdin=None if has_file else stdin, **options)

    def ask(
        self, prompt: str, context: Context, logs: Mapping[str, bytes], role: str = ""
    ) -> Generator[None, bool | None, tuple[Answer, ...]]:
        """Let the agent work once, with `logs` to read. Return what `_take_over` takes; in a `role` no edits."""
        folder = context.ledger.runs_dir / "agent"
        folder.mkdir(parents=True, exist_ok=True)
        name = "-".join(filter(None, (f"{context.number:04d}", str(len(context.refusals) + 1), role)))
        seconds = min(self.timeout_seconds, context.seconds_left or self.timeout_seconds)
        agent = replace(self, timeout_seconds=seconds)
        try:
            with waiting(f"{self.name} is at work on experiment {context.number:04d}", seconds):
                ending = yield from agent.run(context.source, prompt, folder / f"{name}.log", logs)
            first, *others = self._take_over(context, ending, edits=not role)
            save_notes(context, self.clone.path)
        finally:
            self.clone.clear()
        return first.with_proposal(cost=ending.cost, notes=(*first.proposal.notes, *ending.notes)), *others

    def question(self, source: bytes, folder: Path) -> Availability:
        """Ask one question, as a night asks: whether the agent can be reached. It costs a few tokens.

        A preset must answer with the word that was asked for: some programs end with 0 on a wrong key. Your own command
        may print nothing.
        """
        agent = replace(self, timeout_seconds=_QUESTION_SECONDS)
        try:
            with waiting(f"asking {self.name} whether it can be reached", _QUESTION_SECONDS):
                ending: Ending = complete(agent.run(source, _QUESTION, folder / "question.log"))
        finally:
            self.clone.clear()
        if ending.cause is None and (self.name not in PRESETS or _READY.search(ending.words)):
            return Availability(Meaning.OK, ending.words)
        availability = ending.live or read_ending(ending.output, ending.exit_code)
        cause = ending.cause or f"it did not answer the question; its last words: {ending.words or 'none'}"
        return availability if availability.is_away else Availability(Meaning.PROGRAM, cause)

    def _take_over(self, context: Context, ending: Ending, edits: bool) -> tuple[Answer, ...]:
        """Return the agent's proposals, or one answer without a train.toml that says why there is none.

        Without `edits` the answer is a text. A file that cannot be read is a proposal that is refused. A program that
        ended without an edit, or was killed, is asked again: `unavailable` is set.
        """
        path, num_files = self.clone.path, max(context.num_proposals, MAX_GRID) if context.num_proposals > 1 else 1
        names = dict.fromkeys([(CONFIG_NAME, ANSWER_NAME), *proposal_files(num_files)])
        notes, text, texts = tuple[str, ...](), "", dict[bytes, str]()
        try:
            notes, text = self.clone.changes(num_files), _read_answer(path / ANSWER_NAME)
            for config, answer in names if edits else ():
                if config == CONFIG_NAME or os.path.lexists(path / config):
                    texts[read_source(path / config)] = _read_answer(path / answer)
        except ConfigError as error:
            if ending.cause is None:
                return (Answer(b"", cause=f"{self.name}: {error}"),)
            texts = {}
        texts.pop(context.source, None)
        lessons = parse_answer("\n".join((text, *texts.values())))[1]
        bare = Answer(None, Proposal(notes=notes, **parse_answer(text)[0]), lessons)  # type: ignore[arg-type]
        if ending.is_stopped:
            return (replace(bare, cause=f"{self.name}: {ending.cause}", is_stopped=True),)
        answers = [Answer(source, Proposal(**parse_answer(text)[0]), lessons) for source, text in texts.items()]  # type: ignore[arg-type]
        is_whole = all(answer.proposal.description for answer in answers)
        if not answers:
            is_whole = not edits and bool(lessons or bare.proposal.description)
        if ending.cause is not None or not is_whole:
            availability = ending.availability(is_edited=bool(answers))
            if ending.is_killed or availability.is_away or not (answers or is_whole):
                return (replace(bare, cause=f"{self.name}: {availability.text}", unavailable=availability),)
        if ending.cause is not None:
            notes = (*notes, f"{self.name}: {ending.cause}")
        first, *others = answers or [bare]
        return first.with_proposal(notes=notes), *others


@dataclass(slots=True)
class AgentProposer:
    """Asks one agent, the first of `agents`."""

    agents: tuple[Agent, ...]
    is_instant = False

    @property
    def name(self) -> str:
        return self.agents[0].title

    @property
    def sandbox(self) -> str:
        """The sandboxes of the agents: "none" if one of them has none."""
        names = [agent.sandbox.name for agent in self.agents]
        return NO_SANDBOX if NO_SANDBOX in names else " and ".join(dict.fromkeys(names))

    def propose(self, context: Context) -> Proposing:
        return self.agents[0].ask(compose(context), context, logs(context))


def _read_answer(path: Path) -> str:
    """Return the first 64 KiB of an answer; "" if there is none. ConfigError if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(_MAX_ANSWER).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        cause = f"{path.name} in the agent's clone cannot be read: {error.strerror}"
        raise ConfigError(cause, "Leave a regular file.") from None


def check_agent(
    name: str,
    sandbox: str,
    root: Path,
    environ: Mapping[str, str],
    agent_env: Sequence[str] = (),
    agent_sees: Sequence[str] = (),
) -> Check:
    """Ask an agent one question, as a night does before it begins: what it answered, and in which sandbox."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o711)  # another uid goes through it to the clone
            clone = Clone(Repo(root), Path(folder))
            agent = open_agent(name, sandbox, root, environ, _QUESTION_SECONDS, clone, agent_env, agent_sees)
            answer = agent.question(read_source(root / CONFIG_NAME), Path(folder))
        setting = f"({agent.sandbox.warning or f'sandbox: {agent.sandbox.name}'})"
        problem = None if answer.meaning is Meaning.OK else f"{agent.name}: {answer.meaning}: {answer.text} {setting}"
        return Check(ALL, "agent", problem, f"{agent.name}: {answer.text!r} {setting}")
    except NightshiftError as error:
        return Check(ALL, "agent", error)

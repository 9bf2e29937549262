"""Asks a coding agent for the next train.toml: any program that reads a prompt and edits files.

Each proposal is a fresh process with a bounded brief, in a throw-away clone (clone.py), in a sandbox where this machine
has one (sandbox.py), as a process group that leaves nothing behind (executors/process.py). Taken over are its
train.toml, if that is a regular file of sane size, a few lines of text (hypothesis, prediction, the lessons of decided
experiments), and notes for its next call. Asked for several proposals it writes proposal-1.toml and proposal-1.txt, and
so on. Whatever else it did in its clone is named in the notes. Only the sandbox keeps it in there.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from msgspec import structs

from nightshift.agents.availability import Availability, Meaning, read_ending, read_live
from nightshift.agents.base import Answer, Context, Proposing
from nightshift.agents.brief import MAX_GRID, compose, most_answers, save_notes
from nightshift.agents.clone import ANSWER_NAME, Clone, proposal_files
from nightshift.agents.logs import logs
from nightshift.agents.notebook import MAX_SENTENCE, read_lessons
from nightshift.agents.presets import PRESETS, PROMPT_FILE, command_of, login_of
from nightshift.agents.sandbox import Sandbox, choose
from nightshift.agents.usage import Log, summary_of
from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.records import NO_SANDBOX, Cost, Proposal
from nightshift.config.train_toml import read_source
from nightshift.engines.base import ALL, Check
from nightshift.errors import ConfigError, NightshiftError
from nightshift.executors.process import ProcessGroup
from nightshift.files import open_regular, write_atomically
from nightshift.text import clean
from nightshift.waiting import waiting

_LABELS = {
    "HYPOTHESIS": "description",
    "MECHANISM": "mechanism",
    "PREDICTION": "prediction",
    "REFUTED BY": "falsifier",
}
_MAX_ANSWER = 64 * 1024  # bytes that are read of an answer
_ANSWER = re.compile(rf"\b({'|'.join(_LABELS)})\b[ \t*]*+:[ \t*]*")


def parse_answer(text: str) -> dict[str, str]:
    """Return the last text of each label (`HYPOTHESIS: ... PREDICTION: ...`, on one line or several), cleaned, by the
    names of Proposal and Answer. The placeholders of the form are left out."""
    texts = {}
    for line in text.splitlines():
        pieces = _ANSWER.split(line)
        for label, value in zip(pieces[1::2], pieces[2::2], strict=True):
            cleaned = clean(value.strip(" \t*`|"), MAX_SENTENCE)
            if cleaned and not cleaned.startswith("<"):
                texts[_LABELS[label]] = cleaned
    return texts


GRACE_SECONDS = 5.0
STOPPED = "stopped with the night"  # the cause of an answer that nobody waited for
_TICK_SECONDS = 0.2  # between two looks at an agent that is asked one question
_QUESTION = "This asks whether you can be reached. Change no file; answer with one word: ready\n"
_QUESTION_SECONDS = 240.0  # Claude Code tries a wrong key again for 175 s

T = TypeVar("T")
Work = Generator[None, bool | None, T]  # as Proposing: yields while a program works; sending True stops it


def complete(work: Work[T]) -> T:
    """Run a generator of this module to its end, and wait meanwhile."""
    try:
        while True:
            next(work)
            time.sleep(_TICK_SECONDS)
    except StopIteration as end:
        result: T = end.value
        return result
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
    title = name if name in PRESETS else Path(command[0]).name
    return Agent(title, command, timeout_seconds, clone, chosen, settings=tuple(filter(None, (model, effort))))


def agent_environment(base: Mapping[str, str], clone: Path) -> dict[str, str]:
    """Return `base` without the variables that point git or a shell at another place than the clone."""
    kept = {name: value for name, value in base.items() if not name.startswith("GIT_") and name != "OLDPWD"}
    # Should it delete .git, git must not find another repository further up.
    return {**kept, "PWD": str(clone), "GIT_CEILING_DIRECTORIES": str(clone.parent), "GIT_TERMINAL_PROMPT": "0"}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process of an agent ended."""

    cause: str | None  # what went wrong; None if nothing did
    exit_code: int | None  # None if it was stopped
    output: str  # the end of it
    words: str  # its last words
    cost: Cost
    notes: tuple[str, ...]
    live: Availability | None  # why it was stopped: it waited for something itself

    def availability(self, *, is_edited: bool = False) -> Availability:
        """Return whether the agent can be asked again, by the end of the process."""
        return self.live or read_ending(self.output, self.exit_code, is_edited=is_edited)


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

    def run(
        self,
        source: bytes,
        prompt: str,
        log_path: Path,
        seconds_left: float | None = None,
        logs: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Work[Ending]:
        """Run one process from start to end, in a fresh clone with `source` as its train.toml and the files of
        `logs`. The caller clears the clone."""
        group = ProcessGroup(f"agent-{uuid.uuid4().hex}", GRACE_SECONDS)
        timeout = min(self.timeout_seconds, seconds_left or self.timeout_seconds)
        prompt_path = self.clone.folder / "prompt.txt"
        credential, notes, cause, live = None, tuple[str, ...](), None, None
        with ExitStack() as files:
            try:
                self.clone.open(source, logs)
                write_atomically(prompt_path, prompt.encode())
                words = [word.replace(PROMPT_FILE, str(prompt_path)) for word in self.command]
                stdin = files.enter_context(prompt_path.open("rb")) if words == list(self.command) else None
                credential = self.sandbox.furnish(self.clone)
                words, environment = self.sandbox.enclose(words, self.clone, prompt_path)
                log_path.unlink(missing_ok=True)
                log_path.touch(mode=0o600, exist_ok=False)  # what agents print may hold secrets
                log = Log(files.enter_context(log_path.open("r+b")))
                environment = agent_environment(environment, self.clone.path)
                began = self.clock()
                child = group.start(
                    "agent", words, log_path=log_path, env=environment, cwd=self.clone.path, stdin=stdin
                )
                while child.poll() is None and cause is None:
                    left = began + timeout - self.clock()
                    if (yield):
                        cause = STOPPED
                    elif left <= 0.0:
                        cause = f"no end after {timeout:g} s: stopped"
                    elif live is not None:
                        cause = f"stopped: {live.text}"
                    group.check()
                    log.cut()
                    live = read_live(log.end)
            finally:  # also if nothing was started: what git might start, should somebody find a way, ends as well
                survivors = [*group.stop(), *self.sandbox.end()]
                if not survivors:  # also when the night is stopped now: a token may be renewed
                    notes = self.sandbox.take_back(self.clone, credential)
            log.cut()
        last_words, cost = summary_of(log.end)
        exit_code = None if cause or survivors else child.poll()
        if survivors:
            cause = f"could not be stopped: {', '.join(survivors)}"
        elif cause is not None or exit_code != 0:
            cause = (cause or child.exit_cause()) + (f"; its last words: {last_words}" if last_words else "")
        cost = structs.replace(cost, seconds=max(self.clock() - began, 0.0))
        return Ending(cause, exit_code, log.end, last_words, cost, notes, live)

    def ask(self, prompt: str, context: Context, logs: Mapping[str, bytes], role: str = "") -> Work[tuple[Answer, ...]]:
        """Let the agent work once, with `logs` to read. Return what `_take_over` takes; in a `role` no edits."""
        folder = context.ledger.runs_dir / "agent"
        folder.mkdir(parents=True, exist_ok=True)
        name = "-".join(filter(None, (f"{context.number:04d}", str(len(context.refusals) + 1), role)))
        left = context.seconds_left
        try:
            at_most = min(self.timeout_seconds, left or self.timeout_seconds)
            with waiting(f"{self.name} is at work on experiment {context.number:04d}", at_most):
                ending = yield from self.run(context.source, prompt, folder / f"{name}.log", left, logs)
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
                ending = complete(agent.run(source, _QUESTION, folder / "question.log"))
        finally:
            self.clone.clear()
        is_answered = re.search(r"\bready\b", ending.words, re.IGNORECASE) is not None
        if ending.cause is None and (is_answered or self.name not in PRESETS):
            return Availability(Meaning.OK, ending.words)
        availability = ending.availability()
        if availability.waits or availability.needs_user:
            return availability
        cause = ending.cause or f"it did not answer the question; its last words: {ending.words or 'none'}"
        return Availability(Meaning.PROGRAM, cause)

    def _take_over(self, context: Context, ending: Ending, edits: bool) -> tuple[Answer, ...]:
        """Return the agent's answers and, where it `edits`, the train.toml of each; one answer without a train.toml if
        there is none. A process that did not end well leaves only what it finished. A clone that cannot be read is a
        refused proposal."""
        files = [(CONFIG_NAME, ANSWER_NAME)]
        if edits and context.num_proposals > 1:
            files += proposal_files(max(context.num_proposals, MAX_GRID))
        texts, unread, lessons = list[dict[str, str]](), list[str](), dict[int, dict[str, str]]()
        try:
            notes = self.clone.changes(max(context.num_proposals, MAX_GRID) if context.num_proposals > 1 else 1)
            for _, answer_name in files:
                try:
                    answer_text = _read_answer(self.clone.path / answer_name)
                    texts.append(parse_answer(answer_text))
                    lessons |= read_lessons(answer_text)
                except ConfigError as error:
                    if len(files) == 1:
                        raise
                    texts.append({})
                    unread.append(str(error))
        except ConfigError as error:
            return (Answer(b"", cause=f"{self.name}: {error}"),)
        answers, problem = list[Answer](), ""
        for (config_name, _), text in zip(files, texts, strict=True) if edits else ():
            try:
                source = read_source(self.clone.path / config_name)
            except ConfigError as error:
                if config_name == CONFIG_NAME or os.path.lexists(self.clone.path / config_name):
                    problem = f"{error.cause}: it must stay a regular file"
                continue
            if source != context.source and all(source != other.source for other in answers):
                answers.append(Answer(source, Proposal(**text), lessons))  # type: ignore[arg-type]
        answers = answers[: most_answers(context, [answer.source or b"" for answer in answers])]
        ended = f"{self.name}: {ending.cause}" if ending.cause else None
        bare = Answer(None, Proposal(notes=notes, **texts[0]), lessons, cause=ended)  # type: ignore[arg-type]
        is_complete = (
            all(answer.proposal.description for answer in answers) if answers else not edits and (texts[0] or lessons)
        )
        if ending.cause is not None or not is_complete:
            availability = ending.availability(is_edited=bool(answers))
            is_away = availability.waits or availability.needs_user
            if self.name not in PRESETS and ending.exit_code is None and ending.live is None:
                # A command of your own may take its time and print nothing.
                is_away = is_away and availability.meaning is not Meaning.NETWORK
            if is_away and STOPPED not in (ending.cause or ""):
                return (replace(bare, cause=f"{self.name}: {availability.text}", unavailable=availability),)
        is_cut_off = ending.cause is not None and (ending.exit_code or -1) < 0  # stopped in the middle of its work
        if not edits or (answers and is_cut_off):
            return (bare,)
        if not answers:
            missing = f"{self.name} ended without an edit of {CONFIG_NAME}"
            missing += f"; its last words: {ending.words}" if ending.words else ""
            return (replace(bare, source=b"" if problem else None, cause=problem or ended or missing),)
        notes = (*notes, *unread, *filter(None, (ended, problem)))
        return answers[0].with_proposal(notes=notes), *answers[1:]


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

"""Ask a coding agent for the next train.toml. Any program that reads a prompt and edits files can be the agent.

Each proposal is a new process with a bounded brief, in a throw-away clone (clone.py) and in a sandbox (sandbox.py).
Nightshift copies from the clone: train.toml, if it is a regular file of at most 64 KiB; a few lines of text
(hypothesis, prediction, lessons of decided experiments); and notes for the next call.
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
from typing import Any

from msgspec import structs

from nightshift.agents.availability import Availability, Meaning, read_ending
from nightshift.agents.base import Answer, Context, Proposing
from nightshift.agents.brief import compose, logs, save_notes
from nightshift.agents.clone import ANSWER_NAME, Clone, proposal_files
from nightshift.agents.notebook import parse_answer
from nightshift.agents.presets import PRESETS, PROMPT_FILE, command_of, login_of
from nightshift.agents.sandbox import Environ, Sandbox, choose
from nightshift.agents.usage import end_of, summary_of
from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.records import NO_SANDBOX, Cost, Proposal
from nightshift.config.train_toml import read_source
from nightshift.engines.base import ALL, Check
from nightshift.errors import ConfigError, NightshiftError
from nightshift.executors.process import Child, ProcessGroup
from nightshift.files import open_regular, write_atomically
from nightshift.waiting import waiting

_QUESTION = "This asks whether you can be reached. Change no file; answer with one word: ready\n"
_QUESTION_SECONDS = 240.0  # Claude Code retries with a wrong key for 175 s
_TICK_SECONDS = 0.2
GRACE_SECONDS = 5.0

Work = Generator[None, bool | None, Any]  # yields while a program works; sending True stops it (see Proposing)


def complete(work: Work) -> Any:
    """Wait for the end of the work. Returns its value."""
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
    environ: Environ,
    timeout_seconds: float,
    clone: Clone,
    agent_env: Sequence[str],
    agent_sees: Sequence[str],
    *,
    model: str | None = None,
    effort: str | None = None,
) -> Agent:
    """Return the agent `name` in the sandbox that --sandbox names. Raises UsageError if the program is missing, or the
    sandbox does not work here."""
    login = login_of(name, environ, agent_env, agent_sees)
    contained = command_of(name, is_contained=True, model=model, effort=effort)
    chosen = choose(sandbox, contained, login, root, environ, clone)
    command = command_of(name, is_contained=chosen.name != NO_SANDBOX, model=model, effort=effort)
    short_name, settings = name if name in PRESETS else Path(command[0]).name, ", ".join(filter(None, (model, effort)))
    title = f"{short_name} ({settings})" if settings else short_name
    return Agent(short_name, command, timeout_seconds, clone, chosen, title=title)


def agent_environment(base: Environ, clone: Path) -> dict[str, str]:
    """Return `base` without the variables that point git to a place outside the clone."""
    kept = {name: value for name, value in base.items() if not name.startswith("GIT_")}
    # If the agent deletes .git, git must not use a repository above the clone.
    return {**kept, "PWD": f"{clone}", "GIT_CEILING_DIRECTORIES": f"{clone.parent}"}


@dataclass(frozen=True)
class Ending:
    """How a process of an agent ended."""

    cause: str | None  # the failure with the last words; None without a failure
    exit_code: int | None  # None if the process was stopped
    output: str  # the end of the output
    words: str  # the last words
    cost: Cost
    notes: tuple[str, ...]
    is_stopped: bool = False  # because the night ended

    def availability(self, *, is_edited: bool = False) -> Availability:
        """Return why the process made no proposal."""
        availability = read_ending(self.output, self.exit_code, is_edited=is_edited)
        if availability.is_away and self.exit_code is not None:
            return availability
        return replace(availability, text=self.cause or f"the last words: {self.words or 'none'}")


@dataclass(frozen=True)
class Agent:
    """A coding agent's command, run in a clone and in a sandbox."""

    name: str
    command: tuple[str, ...]
    timeout_seconds: float
    clone: Clone
    sandbox: Sandbox
    clock: Callable[[], float] = time.monotonic
    title: str = ""  # name, model and effort, such as `claude (opus, high)`

    def run(self, source: bytes, prompt: str, log_path: Path, logs: Mapping[str, bytes]) -> Work:
        """Run one process in a new clone, which the caller clears, with `source` as train.toml. Returns the Ending."""
        group = ProcessGroup(f"agent-{uuid.uuid4().hex}", GRACE_SECONDS)
        began, credential, notes, cause, is_stopped = self.clock(), None, tuple[str, ...](), None, False
        log_path.unlink(missing_ok=True)
        log_path.touch(mode=0o600)  # the output of agents may contain secrets
        try:
            self.clone.open(source, logs)
            credential = self.sandbox.furnish(self.clone)
            child = self._start(group, prompt, log_path)
            while child.poll() is None and cause is None:
                if (yield):
                    cause, is_stopped = "stopped with the night", True
                elif self.clock() - began >= self.timeout_seconds:
                    cause = f"stopped after {self.timeout_seconds:g} s, the time limit"
                group.check()
        finally:
            survivors = [*group.stop(), *self.sandbox.end()]
            if not survivors:  # also after a stop: the agent may have renewed its token
                home, environ = self.clone.folder / "home", self.sandbox.environ
                notes = self.sandbox.login.take_back(environ, home, credential)
        output = end_of(log_path)
        words, cost = summary_of(output)
        exit_code = None if cause or survivors else child.poll()
        if survivors:
            cause = f"could not be stopped: {', '.join(survivors)}"
        elif exit_code != 0:
            cause = (cause or child.exit_cause()) + (f"; the last words: {words}" if words else "")
        cost = structs.replace(cost, seconds=max(self.clock() - began, 0.0))
        return Ending(cause, exit_code, output, words, cost, notes, is_stopped)

    def _start(self, group: ProcessGroup, prompt: str, log_path: Path) -> Child:
        """Start the program with the prompt on stdin, or in a file if the command has {prompt_file}."""
        write_atomically(self.clone.prompt, prompt.encode())
        words = [word.replace(PROMPT_FILE, str(self.clone.prompt)) for word in self.command]
        argv, variables = self.sandbox.enclose(words, self.clone)
        environ = agent_environment(variables, self.clone.path)
        with self.clone.prompt.open("rb") as file:
            stdin = file if words == [*self.command] else None
            return group.start("agent", argv, log_path=log_path, stdin=stdin, env=environ, cwd=self.clone.path)

    def ask(self, prompt: str, context: Context, logs: Mapping[str, bytes], role: str = "") -> Proposing:
        """Let the agent work once, with the files of `logs`. Returns its answers. A `role` answers without edits."""
        folder = context.ledger.runs_dir / "agent"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{context.number:04d}-{len(context.refusals) + 1}{role and f'-{role}'}"
        seconds = min(self.timeout_seconds, context.seconds_left)
        agent = replace(self, timeout_seconds=seconds)
        try:
            with waiting(f"{self.name} is working on experiment {context.number:04d}", seconds):
                ending = yield from agent.run(context.source, prompt, folder / f"{name}.log", logs)
            first, *others = self._take_over(context, ending, edits=not role)
            save_notes(context, self.clone.path)
        finally:
            self.clone.clear()
        return first.with_proposal(cost=ending.cost, notes=(*first.proposal.notes, *ending.notes)), *others

    def question(self, source: bytes, folder: Path) -> Availability:
        """Ask the agent one question, which costs a few tokens. Returns whether the model can be reached. A preset must
        answer `ready`, because some programs exit with 0 on a wrong key."""
        agent = replace(self, timeout_seconds=_QUESTION_SECONDS)
        try:
            with waiting(f"asking {self.name} whether it can be reached", _QUESTION_SECONDS):
                ending: Ending = complete(agent.run(source, _QUESTION, folder / "question.log", {}))
        finally:
            self.clone.clear()
        if ending.cause is None and (self.name not in PRESETS or re.search(r"\bready\b", ending.words, re.IGNORECASE)):
            return Availability(Meaning.OK, ending.words)
        answer = ending.availability()
        return answer if answer.is_away else replace(answer, meaning=Meaning.PROGRAM)

    def _take_over(self, context: Context, ending: Ending, edits: bool) -> tuple[Answer, ...]:
        """Return the agent's proposals (without `edits`: its text), or one answer with the cause. `unavailable` is set
        if the program failed or made no edit, so that the night asks again."""
        path, text, texts = self.clone.path, "", dict[bytes | None, str]()
        try:
            text = _read_answer(path / ANSWER_NAME)
            for config, answer in proposal_files(context.num_proposals) if edits else ():
                if config == CONFIG_NAME or os.path.lexists(path / config):
                    texts[read_source(path / config)] = _read_answer(path / answer)
        except ConfigError as error:
            if ending.cause is None:
                return (Answer(b"", cause=f"{self.name}: {error}"),)
        texts.pop(context.source, None)
        lessons = parse_answer("\n".join((text, *texts.values())))[1]
        answers = [
            Answer(source, Proposal(**parse_answer(words)[0]), lessons)  # type: ignore[arg-type]
            for source, words in (texts or {None: text}).items()
        ]
        bare, is_described = replace(answers[0], source=None), all(a.proposal.description for a in answers)
        if ending.is_stopped:
            return (replace(bare, cause=f"{self.name}: {ending.cause}", is_stopped=True),)
        is_answer = ending.cause is None and bool(texts or (not edits and (is_described or lessons)))
        if not is_answer or not is_described:
            availability = ending.availability(is_edited=is_answer)
            if availability.is_away or not is_answer:
                return (replace(bare, cause=f"{self.name}: {availability.text}", unavailable=availability),)
        return tuple(answers)


@dataclass(slots=True)
class AgentProposer:
    """Asks one agent, which is the first of `agents`."""

    agents: tuple[Agent, ...]
    is_instant = False

    @property
    def name(self) -> str:
        return self.agents[0].title

    @property
    def sandbox(self) -> str:
        """The sandboxes of the agents; "none" if any agent has no sandbox."""
        names = [agent.sandbox.name for agent in self.agents]
        return NO_SANDBOX if NO_SANDBOX in names else " and ".join(dict.fromkeys(names))

    def propose(self, context: Context) -> Proposing:
        return self.agents[0].ask(compose(context), context, logs(context))


def _read_answer(path: Path) -> str:
    """Return the first 64 KiB of a file; "" for a missing file. Raises ConfigError for a file that cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(64 * 1024).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        cause = f"{path.name} in the agent's clone cannot be read: {error.strerror}"
        raise ConfigError(cause, "Leave a regular file.") from None


def check_agent(name: str, sandbox: str, root: Path, environ: Environ, *seen: Sequence[str]) -> Check:
    """Ask an agent one question, for `nightshift doctor --agent`. Returns its answer with its sandbox. `seen`: the
    arguments of --agent-env and --agent-sees."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o711)  # the uid of --sandbox user must reach the clone
            clone = Clone(Repo(root), Path(folder))
            agent = open_agent(name, sandbox, root, environ, _QUESTION_SECONDS, clone, *seen)
            answer = agent.question(read_source(root / CONFIG_NAME), Path(folder))
        setting = f"({agent.sandbox.warning or f'sandbox: {agent.sandbox.name}'})"
        problem = None if answer.meaning is Meaning.OK else f"{agent.name}: {answer.meaning}: {answer.text} {setting}"
        return Check(ALL, "agent", problem, f"{agent.name}: {answer.text!r} {setting}")
    except NightshiftError as error:
        return Check(ALL, "agent", error)

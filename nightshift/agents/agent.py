"""Asks a coding agent for the next train.toml: any program that reads a prompt and edits files.

Each proposal is a fresh process with a bounded brief, in a throw-away clone (clone.py), in a sandbox where this machine
has one (sandbox.py), as a process group that leaves nothing behind (executors/process.py). Taken over are its
train.toml, if that is a regular file of sane size, and a few lines of text: hypothesis, prediction, and the lesson of
the experiment before. Whatever else it did in its clone is named in the notes. Only the sandbox keeps
it in there.
"""

from __future__ import annotations

import re
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import TimeoutExpired
from types import MappingProxyType
from typing import NamedTuple

from nightshift.agents.base import Answer, Context
from nightshift.agents.brief import MAX_SENTENCE, compose
from nightshift.agents.clone import ANSWER_NAME, Clone
from nightshift.agents.presets import PRESETS, PROMPT_FILE, command_of, login_of
from nightshift.agents.sandbox import Sandbox, choose
from nightshift.agents.usage import Log, said
from nightshift.campaign.git import CONFIG_NAME, Repo
from nightshift.campaign.records import NO_SANDBOX, Cost, Proposal
from nightshift.config.toml_text import read_source
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
    "OUTCOME": "reported_outcome",
    "LESSON": "lesson",
}
_OF_THE_LAST = ("reported_outcome", "lesson")  # what an answer says of the experiment before
_MAX_ANSWER = 64 * 1024  # bytes that are read of an answer
_ANSWER = re.compile(rf"\b({'|'.join(_LABELS)})\b[ \t*]*+:[ \t*]*")


def parse_answer(text: str) -> dict[str, str]:
    """By the names of Proposal and Answer, the last of each that a text says as `HYPOTHESIS: ... PREDICTION: ...`, on
    one line or several; cleaned, and without the placeholders of the form."""
    found = {}
    for line in text.splitlines():
        pieces = _ANSWER.split(line)
        for name, value in zip(pieces[1::2], pieces[2::2], strict=True):
            cleaned = clean(value.strip(" \t*`|"), MAX_SENTENCE)
            if cleaned and not cleaned.startswith("<"):
                found[_LABELS[name]] = cleaned
    return found


GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.5
_QUESTION = "This asks whether you can be reached. Change no file; answer with one word: ready.\n"
_QUESTION_SECONDS = 120.0


def open_agent(
    name: str,
    sandbox: str,
    root: Path,
    environ: Mapping[str, str],
    timeout_seconds: float,
    clone: Clone,
    clock: Callable[[], float] = time.monotonic,
) -> Agent:
    """The agent that is called `name`, in what --sandbox `sandbox` asks for. UsageError where that does not work."""
    contained = command_of(name, is_contained=True)
    chosen = choose(sandbox, contained, login_of(name, environ), root, environ, clone)
    command = command_of(name) if chosen.name == NO_SANDBOX else contained
    title = name if name in PRESETS else Path(command[0]).name
    return Agent(title, command, timeout_seconds, clone, chosen, clock)


def agent_environment(base: Mapping[str, str], clone: Path) -> dict[str, str]:
    """`base`, keys and all, less what points git or a shell at another place than the clone."""
    kept = {name: value for name, value in base.items() if not name.startswith("GIT_") and name != "OLDPWD"}
    # Should it delete .git, git must not find another repository further up.
    return {**kept, "PWD": str(clone), "GIT_CEILING_DIRECTORIES": str(clone.parent), "GIT_TERMINAL_PROMPT": "0"}


class Ending(NamedTuple):
    """How a process of an agent went: what went wrong, if anything; notes; its last words; what it cost."""

    cause: str | None
    notes: tuple[str, ...]
    said: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent's command, run in a clone and in a sandbox."""

    name: str
    command: tuple[str, ...]
    timeout_seconds: float
    clone: Clone
    sandbox: Sandbox
    clock: Callable[[], float] = time.monotonic

    def run(
        self,
        source: bytes,
        prompt: str,
        log_path: Path,
        is_stopping: Callable[[], bool] = lambda: False,
        seconds_left: float | None = None,
        evidence: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Ending:
        """One process from start to end, in a fresh clone with `source` as its train.toml and, to be read, the files of
        `evidence`. The caller clears that."""
        group = ProcessGroup(f"agent-{uuid.uuid4().hex}", GRACE_SECONDS)
        try:  # what git might start, should somebody find a way, ends with the agent
            self.clone.open(source, evidence)
            ending = self._run(group, prompt, log_path, is_stopping, seconds_left)
        except BaseException:
            group.stop()
            self.sandbox.end()
            raise
        return ending

    def ask(
        self,
        prompt: str,
        context: Context,
        is_stopping: Callable[[], bool],
        role: str = "",
        evidence: Mapping[str, bytes] | None = None,
    ) -> Answer:
        """Let it work once, with `evidence` to read, and take over what may be taken over: in a `role` its answer only,
        else its train.toml too."""
        folder = context.ledger.runs_dir / "agent"
        folder.mkdir(parents=True, exist_ok=True)
        name = "-".join(filter(None, (f"{context.number:04d}", str(len(context.refusals) + 1), role)))
        try:
            left, log = context.seconds_left, folder / f"{name}.log"
            at_most = min(self.timeout_seconds, left or self.timeout_seconds)
            with waiting(f"{self.name} is at work on experiment {context.number:04d}", at_most):
                ending = self.run(context.source, prompt, log, is_stopping, left, evidence or {})
            answer = _take_over(self, context.source, ending.cause, edits=not role)
        finally:
            self.clone.clear()
        return answer.with_proposal(cost=ending.cost, notes=(*answer.proposal.notes, *ending.notes))

    def _run(
        self,
        group: ProcessGroup,
        prompt: str,
        log_path: Path,
        is_stopping: Callable[[], bool],
        seconds_left: float | None,
    ) -> Ending:
        prompt_path = self.clone.folder / "prompt.txt"
        write_atomically(prompt_path, prompt.encode())
        words = [word.replace(PROMPT_FILE, str(prompt_path)) for word in self.command]
        stdin = prompt_path.open("rb") if words == list(self.command) else None
        notes, credential = tuple[str, ...](), self.sandbox.furnish(self.clone)
        words, environment = self.sandbox.enclose(words, self.clone, prompt_path)
        log_path.unlink(missing_ok=True)
        log_path.touch(mode=0o600, exist_ok=False)  # what agents print may hold secrets
        began = self.clock()
        with stdin or nullcontext(), log_path.open("r+b") as file:
            log, cause = Log(file), None
            try:
                child = group.start(
                    "agent",
                    words,
                    log_path=log_path,
                    env=agent_environment(environment, self.clone.path),
                    cwd=self.clone.path,
                    stdin=stdin,
                )
                timeout = min(self.timeout_seconds, seconds_left or self.timeout_seconds)
                deadline = self.clock() + timeout
                while child.poll() is None and cause is None:
                    if is_stopping():
                        cause = "stopped with the night"
                    elif self.clock() >= deadline:
                        cause = f"no end after {timeout:g} s: stopped"
                    group.check()
                    log.cut()
                    with suppress(TimeoutExpired):
                        child.wait(_POLL_SECONDS)
            finally:
                left = [*group.stop(), *self.sandbox.end()]
                if not left:  # also when the night is stopped now: a token may be renewed
                    notes = self.sandbox.take_back(self.clone, credential)
            log.cut()
        last, told = said(log.end)
        cost = replace(told, seconds=max(self.clock() - began, 0.0))
        if left:
            cause = f"could not be stopped: {', '.join(left)}"
        elif cause is not None or child.poll() != 0:
            cause = (cause or child.exit_cause()) + (f"; its last words: {last}" if last else "")
        return Ending(cause, notes, last, cost)


@dataclass(frozen=True, slots=True)
class AgentProposer:
    """Asks one agent, once for each proposal."""

    agent: Agent

    @property
    def name(self) -> str:
        return self.agent.name

    @property
    def sandbox(self) -> str:
        return self.agent.sandbox.name

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Answer:
        return self.agent.ask(compose(context), context, is_stopping)


def _take_over(agent: Agent, before: bytes, cause: str | None, edits: bool) -> Answer:
    """Its answer and, where it `edits`, its train.toml; a process that did not end well leaves nothing but what it
    finished. A clone that cannot be read is a refused proposal."""
    try:
        notes = agent.clone.changes()
        text = _read_answer(agent.clone.path / ANSWER_NAME)
    except ConfigError as error:
        return Answer(b"", cause=f"{agent.name}: {error}")
    said = parse_answer(text)
    ended = None if cause is None else f"{agent.name}: {cause}"
    about_the_last = {name: said.pop(name) for name in _OF_THE_LAST if name in said}
    answer = Answer(None, Proposal(notes=notes, **said), **about_the_last)  # type: ignore[arg-type]
    if not edits:
        return replace(answer, cause=ended)
    try:
        source = read_source(agent.clone.path / CONFIG_NAME)
    except ConfigError as error:
        return replace(answer, source=b"", cause=f"{error.cause}: it must stay a regular file")
    if source == before:
        return replace(answer, cause=ended or f"{agent.name} ended without an edit of train.toml")
    if cause is not None and not cause.startswith("exit code"):  # stopped in the middle of its work
        return replace(answer, cause=ended)
    answer = replace(answer, source=source)
    return answer if ended is None else answer.with_proposal(notes=(*notes, ended))


def _read_answer(path: Path) -> str:
    """The text of an answer, its first 64 KiB; "" if there is none. ConfigError if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(_MAX_ANSWER).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        cause = f"{ANSWER_NAME} in the agent's clone cannot be read: {error.strerror}"
        raise ConfigError(cause, "Leave a regular file.") from None


def check_agent(name: str, sandbox: str, root: Path, environ: Mapping[str, str]) -> Check:
    """Ask an agent one question as a night asks: what came, and in which sandbox. It costs a few tokens."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o711)  # another uid goes through it to the clone
            agent = open_agent(name, sandbox, root, environ, _QUESTION_SECONDS, Clone(Repo(root), Path(folder)))
            with waiting(f"asking {agent.name} whether it can be reached", _QUESTION_SECONDS):
                ending = agent.run(read_source(root / CONFIG_NAME), _QUESTION, Path(folder) / "log")
        setting = f"({agent.sandbox.warning or f'sandbox: {agent.sandbox.name}'})"
        problem = ending.cause and f"{agent.name}: {ending.cause} {setting}"
        return Check(ALL, "agent", problem, f"{agent.name}: {ending.said!r} {setting}")
    except NightshiftError as error:
        return Check(ALL, "agent", error)

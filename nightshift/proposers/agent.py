"""Asks a coding agent for the next train.toml: any program that reads a prompt and edits files.

Each proposal is a fresh process with a bounded brief, in a throw-away clone (guard/clone.py), as a process
group that leaves nothing behind (supervise.py). Taken over are its train.toml, if that is a regular file
of sane size, and up to three lines of text: hypothesis, prediction, and the lesson of the experiment
before. Whatever else it did is named in the notes. The checkout itself is compared before and after
(guard/seal.py), and so is the Python environment (guard/surroundings.py): what an agent does past its clone cannot be
prevented, only detected.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE
from typing import IO

from nightshift.errors import ConfigError, UsageError
from nightshift.files import write_atomically
from nightshift.git.repo import CONFIG_NAME
from nightshift.guard import seal, surroundings
from nightshift.guard.clone import ANSWER_NAME, Clone
from nightshift.guard.seal import Checkout
from nightshift.processes.supervise import Child, ProcessGroup
from nightshift.proposers import Context, Proposal
from nightshift.proposers.brief import MAX_SENTENCE, compose
from nightshift.proposers.history import clean
from nightshift.train_toml.text import read_source

# Headless and allowed to edit. Checked against `--help` of Claude Code 2.1.329, Codex CLI 0.169.0 and Gemini CLI
# 0.61.0, all of which read the prompt on stdin. Without --skip-trust Gemini refuses to work in a new folder.
PRESETS = {
    "claude": "claude -p --permission-mode acceptEdits",
    "codex": "codex exec --sandbox workspace-write --skip-git-repo-check",
    "gemini": "gemini --skip-trust --approval-mode auto_edit",
}
PROMPT_FILE = "{prompt_file}"
GRACE_SECONDS = 5.0
MAX_LOG_BYTES = 1_000_000
_TAIL_BYTES = 64 * 1024
_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2
_CHECK_SECONDS = 1.0
_ANSWER = re.compile(r"\b(HYPOTHESIS|PREDICTION|LESSON)\b[ \t]*\**[ \t]*:[ \t]*\**[ \t]*")


def command_of(agent: str) -> tuple[str, ...]:
    """The words of a preset's or of the person's own command. UsageError if its program is not to be found."""
    try:
        words = tuple(shlex.split(PRESETS.get(agent, agent)))
    except ValueError as error:
        raise UsageError(f"--agent {agent!r} is no command ({error})", "Close its quotes.") from None
    if not words or shutil.which(words[0]) is None:
        presets = ", ".join([*PRESETS, "tpe", "random"])
        raise UsageError(
            f"--agent {agent}: no program {words[0] if words else ''!r} on PATH",
            f"Install it, or give {presets}, or a command that reads the prompt on stdin or {PROMPT_FILE}.",
        )
    return words


def agent_environment(base: Mapping[str, str], clone: Path) -> dict[str, str]:
    """The person's environment, keys and all, less what points git or a shell at another place than the clone."""
    kept = {name: value for name, value in base.items() if not name.startswith("GIT_") and name != "OLDPWD"}
    # Should it delete .git, git must not find another repository further up.
    return {**kept, "PWD": str(clone), "GIT_CEILING_DIRECTORIES": str(clone.parent), "GIT_TERMINAL_PROMPT": "0"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The lines of text that are taken over, cleaned; None where the agent gave none."""

    hypothesis: str | None = None
    prediction: str | None = None
    lesson: str | None = None


def parse_answer(text: str) -> Answer:
    """`HYPOTHESIS: ... PREDICTION: ... LESSON: ...`, on one line or several; the last of each, placeholders aside."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        pieces = _ANSWER.split(line)
        for name, value in zip(pieces[1::2], pieces[2::2], strict=True):
            cleaned = clean(value.strip(" \t*`|"), MAX_SENTENCE)
            if cleaned and not cleaned.startswith("<"):  # a program that prints its prompt repeats the form
                found[name.lower()] = cleaned
    return Answer(**found)


@dataclass(frozen=True, slots=True)
class AgentProposer:
    """A coding agent's command, run once for each proposal."""

    name: str
    command: tuple[str, ...]
    checkout: Checkout
    environment: Mapping[str, str]
    timeout_seconds: float
    clone: Clone
    clock: Callable[[], float] = time.monotonic

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        """Brief it, let it work, take over what may be taken over. UsageError if it reached past its clone."""
        before, environment = seal.take(self.checkout), surroundings.take(self.checkout.root)
        try:
            listing = self.clone.open(context.source)
            prompt = compose(context)
            log_path = self._log_path(context)
            cause, tail = self._run(prompt, log_path, context, is_stopping)
            notes = self.clone.changes(listing)
            proposal = self._take_over(context, cause, tail)
        finally:
            self.clone.clear()
        notes += seal.restore(before, self.checkout)
        surroundings.require_same(environment, self.checkout.root)
        return replace(proposal, notes=(*proposal.notes, *notes))

    def _log_path(self, context: Context) -> Path:
        folder = context.ledger.runs_dir / "agent"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{context.number:04d}-{len(context.refusals) + 1}.log"
        path.unlink(missing_ok=True)
        return path

    def _run(
        self, prompt: str, log_path: Path, context: Context, is_stopping: Callable[[], bool]
    ) -> tuple[str | None, str]:
        """One process from start to end. Returns what went wrong, if anything, and the end of its output."""
        prompt_path = self.clone.folder / "prompt.txt"
        write_atomically(prompt_path, prompt.encode())
        timeout = min(self.timeout_seconds, context.seconds_left or self.timeout_seconds)
        words = [word.replace(PROMPT_FILE, str(prompt_path)) for word in self.command]
        # stderr joins stdout, so that one pipe bounds what the disk gets.
        argv = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *words]
        group = ProcessGroup(f"agent-{context.number:04d}-{uuid.uuid4().hex}", GRACE_SECONDS)
        with ExitStack() as stack:
            stdin = None if words != list(self.command) else stack.enter_context(prompt_path.open("rb"))
            log = stack.enter_context(log_path.open("ab"))
            try:
                child = group.start(
                    "agent",
                    argv,
                    log_path=log_path,
                    env=agent_environment(self.environment, self.clone.path),
                    cwd=self.clone.path,
                    stdin=stdin,
                    stdout=PIPE,
                )
                output = _Output(child, log)
                cause = _wait(child, group, output, timeout, is_stopping, self.clock)
            finally:
                left = group.stop()
            if left:
                cause = f"could not be stopped: {', '.join(left)}"
            elif cause is None and child.poll() != 0:
                cause = child.exit_cause()
            return cause, output.finish()

    def _take_over(self, context: Context, cause: str | None, tail: str) -> Proposal:
        """Its train.toml and its answer; a process that did not end well leaves nothing but what it finished."""
        answer_path = self.clone.path / ANSWER_NAME
        notes: tuple[str, ...] = ()
        try:
            text = read_source(answer_path).decode(errors="replace")
            answer = parse_answer(text)
            if answer == Answer():  # without the form: its first line is the hypothesis
                answer = parse_answer(f"HYPOTHESIS: {text.strip().partition(chr(10))[0]}")
        except ConfigError as error:
            answer = Answer()
            if os.path.lexists(answer_path):
                notes = (f"left no readable {ANSWER_NAME}: {error.cause}",)
        said = parse_answer(tail)
        answer = Answer(
            answer.hypothesis or said.hypothesis, answer.prediction or said.prediction, answer.lesson or said.lesson
        )
        ended = None if cause is None else f"{self.name}: {cause}{_last_words(tail)}"
        proposal = Proposal(None, answer.hypothesis or "", answer.prediction, answer.lesson, notes)
        try:
            source = read_source(self.clone.path / CONFIG_NAME)
        except ConfigError as error:
            return replace(proposal, source=b"", cause=f"{error.cause}: it must stay a regular file")
        if source == context.source:
            return replace(proposal, cause=ended or f"{self.name} ended without an edit of train.toml")
        if cause is not None and not cause.startswith("exit code"):  # stopped in the middle of its work
            return replace(proposal, cause=ended)
        return replace(proposal, source=source, notes=notes if ended is None else (*notes, ended))


class _Output:
    """What a child writes: the first megabyte to its log, the end of it in memory, the rest nowhere."""

    def __init__(self, child: Child, log: IO[bytes]) -> None:
        assert child.stdout is not None
        self._descriptor = child.stdout.fileno()
        os.set_blocking(self._descriptor, False)
        self._log = log
        self._tail = b""
        self._num_bytes = 0
        self.is_open = True

    def read(self, timeout_seconds: float) -> bool:
        """Take what is there, waiting for it at most so long; False if there was nothing."""
        if not select.select([self._descriptor], [], [], timeout_seconds)[0]:
            return False
        try:
            data = os.read(self._descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.is_open = data != b""
        self._log.write(data[: max(0, MAX_LOG_BYTES - self._num_bytes)])
        self._log.flush()
        self._num_bytes += len(data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return self.is_open

    def finish(self) -> str:
        """The end of the output as text; the log says how much it lacks."""
        if self._num_bytes > MAX_LOG_BYTES:
            self._log.write(f"\n... {self._num_bytes:,} bytes in all; the last of them:\n".encode() + self._tail)
        return self._tail.decode(errors="replace")


def _wait(
    child: Child,
    group: ProcessGroup,
    output: _Output,
    timeout_seconds: float,
    is_stopping: Callable[[], bool],
    clock: Callable[[], float],
) -> str | None:
    """Read until the child ends; why it was not waited for any longer, if so."""
    deadline = clock() + timeout_seconds
    next_check = 0.0
    while child.poll() is None:
        now = clock()
        if is_stopping():
            return "stopped with the night"
        if now >= deadline:
            return f"no end after {timeout_seconds:g} s: stopped"
        if now >= next_check:
            group.check()
            next_check = now + _CHECK_SECONDS
        if not output.is_open:  # it closed its stdout and works on
            time.sleep(_POLL_SECONDS)
        else:
            output.read(_POLL_SECONDS)
    until = clock() + GRACE_SECONDS  # a grandchild may hold the pipe open, and write for ever
    while output.read(0) and clock() < until:
        pass
    return None


def _last_words(tail: str) -> str:
    lines = [line for line in (clean(line, 120) for line in tail.splitlines()) if line]
    return f"; its last words: {lines[-1]}" if lines else ""

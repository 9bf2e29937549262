"""Asks a coding agent for the next train.toml: any program that reads a prompt and edits files.

Each proposal is a fresh process with a bounded brief, in a throw-away clone (guard/clone.py), as a process
group that leaves nothing behind (supervise.py). Taken over are its train.toml, if that is a regular file of sane
size, and up to three lines of text: hypothesis, prediction, and the lesson of the experiment before. Whatever else it
did is named in the notes. The checkout itself is compared before and after (guard/seal.py), and so is the Python
environment (guard/surroundings.py): what an agent does past its clone cannot be prevented, only detected.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import IO

from nightshift.errors import ConfigError, UsageError, listed
from nightshift.files import write_atomically
from nightshift.git.repo import CONFIG_NAME
from nightshift.guard import seal
from nightshift.guard.clone import ANSWER_NAME, Clone
from nightshift.guard.seal import Checkout
from nightshift.guard.surroundings import Surroundings
from nightshift.processes.supervise import ProcessGroup
from nightshift.proposers import Context, Proposal
from nightshift.proposers.brief import MAX_SENTENCE, compose
from nightshift.text import clean
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
_POLL_SECONDS = 0.5
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


def parse_answer(text: str) -> dict[str, str]:
    """The last `hypothesis`, `prediction` and `lesson` of a text that says `HYPOTHESIS: ... PREDICTION: ...`, on one
    line or several; cleaned, and without the placeholders of the form."""
    found = {}
    for line in text.splitlines():
        pieces = _ANSWER.split(line)
        for name, value in zip(pieces[1::2], pieces[2::2], strict=True):
            cleaned = clean(value.strip(" \t*`|"), MAX_SENTENCE)
            if cleaned and not cleaned.startswith("<"):
                found[name.lower()] = cleaned
    return found


@dataclass(frozen=True, slots=True)
class AgentProposer:
    """A coding agent's command, run once for each proposal."""

    name: str
    command: tuple[str, ...]
    checkout: Checkout
    environment: Mapping[str, str]
    timeout_seconds: float
    clone: Clone
    surroundings: Surroundings
    clock: Callable[[], float] = time.monotonic

    def propose(self, context: Context, is_stopping: Callable[[], bool]) -> Proposal:
        """Brief it, let it work, take over what may be taken over. UsageError if it reached past its clone."""
        before = seal.take(self.checkout)
        self.surroundings.look()
        try:
            listing = self.clone.open(context.source)
            cause = self._run(context, is_stopping)
            notes = self.clone.changes(listing)
            proposal = self._take_over(context, cause)
        finally:
            self.clone.clear()
        notes += seal.restore(before, self.checkout)
        if changed := self.surroundings.changed():
            raise UsageError(
                f"{listed(changed)} changed while the agent worked: workers would import it",
                "Look at the change and undo it (uv sync --reinstall); then start the night again.",
            )
        return replace(proposal, notes=(*proposal.notes, *notes))

    def _run(self, context: Context, is_stopping: Callable[[], bool]) -> str | None:
        """One process from start to end; what went wrong, if anything."""
        prompt_path = self.clone.folder / "prompt.txt"
        write_atomically(prompt_path, compose(context).encode())
        log_path = context.ledger.runs_dir / "agent" / f"{context.number:04d}-{len(context.refusals) + 1}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.unlink(missing_ok=True)
        words = [word.replace(PROMPT_FILE, str(prompt_path)) for word in self.command]
        group = ProcessGroup(f"agent-{context.number:04d}-{uuid.uuid4().hex}", GRACE_SECONDS)
        with prompt_path.open("rb") as prompt, log_path.open("ab") as log:
            try:
                child = group.start(
                    "agent",
                    words,
                    log_path=log_path,
                    env=agent_environment(self.environment, self.clone.path),
                    cwd=self.clone.path,
                    stdin=prompt if words == list(self.command) else None,
                )
                timeout = min(self.timeout_seconds, context.seconds_left or self.timeout_seconds)
                deadline, cause = self.clock() + timeout, None
                while child.poll() is None and cause is None:
                    if is_stopping():
                        cause = "stopped with the night"
                    elif self.clock() >= deadline:
                        cause = f"no end after {timeout:g} s: stopped"
                    group.check()
                    _cut(log)
                    with suppress(TimeoutExpired):
                        child.wait(_POLL_SECONDS)
            finally:
                left = group.stop()
            if left:
                cause = f"could not be stopped: {', '.join(left)}"
            elif cause is None and child.poll() != 0:
                cause = child.exit_cause()
            if cause is not None and (last := child.tail(1)):
                cause += f"; its last words: {clean(last[0], 120)}"
            _cut(log)
        return cause

    def _take_over(self, context: Context, cause: str | None) -> Proposal:
        """Its train.toml and its answer; a process that did not end well leaves nothing but what it finished."""
        answer_path, answer, notes = self.clone.path / ANSWER_NAME, dict[str, str](), tuple[str, ...]()
        try:
            answer = parse_answer(read_source(answer_path).decode(errors="replace"))
        except ConfigError as error:
            if os.path.lexists(answer_path):
                notes = (f"left no readable {ANSWER_NAME}: {error.cause}",)
        proposal = Proposal(None, notes=notes, **answer)
        ended = None if cause is None else f"{self.name}: {cause}"
        try:
            source = read_source(self.clone.path / CONFIG_NAME)
        except ConfigError as error:
            return replace(proposal, source=b"", cause=f"{error.cause}: it must stay a regular file")
        if source == context.source:
            return replace(proposal, cause=ended or f"{self.name} ended without an edit of train.toml")
        if cause is not None and not cause.startswith("exit code"):  # stopped in the middle of its work
            return replace(proposal, cause=ended)
        return replace(proposal, source=source, notes=notes if ended is None else (*notes, ended))


def _cut(log: IO[bytes]) -> None:
    """A program that prints for ever does not fill the disk."""
    if os.fstat(log.fileno()).st_size > MAX_LOG_BYTES:
        log.truncate(MAX_LOG_BYTES)

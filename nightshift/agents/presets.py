"""The coding agents that are known by name: their commands, and what each needs of yours in a sandbox."""

import shlex
import shutil
from dataclasses import dataclass

from nightshift.agents.sandbox import Login
from nightshift.errors import UsageError


@dataclass(frozen=True, slots=True)
class Preset:
    """An agent's command, the same for in a sandbox (where no program can build one of its own), its login."""

    command: str
    contained: str
    login: Login


# Headless and allowed to edit. Checked against `--help` of Claude Code 2.1.197, Codex CLI 0.169.0 and Gemini CLI
# 0.61.0, all of which read the prompt on stdin, and their packages for what they keep where. Without --skip-trust
# Gemini refuses to work in a new folder; GEMINI_SANDBOX would win over its flag. What they print as JSON tells what
# their work cost (usage.py): the answer itself is files.
PRESETS = {
    "claude": Preset(
        "claude -p --output-format json --permission-mode acceptEdits",
        """claude -p --output-format json --permission-mode acceptEdits --settings '{"sandbox":{"enabled":false}}'""",
        Login(
            ("ANTHROPIC_*", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_USE_*", "AWS_REGION", "AWS_BEARER_TOKEN_BEDROCK"),
            (".claude", "CLAUDE_CONFIG_DIR"),
            ".credentials.json",
            ("settings.json",),
        ),
    ),
    "codex": Preset(
        "codex exec --json --sandbox workspace-write --skip-git-repo-check",
        "codex exec --json --sandbox danger-full-access --skip-git-repo-check",
        Login(("OPENAI_*", "CODEX_API_KEY"), (".codex", "CODEX_HOME"), "auth.json", ("config.toml",)),
    ),
    "gemini": Preset(
        "gemini --output-format json --skip-trust --approval-mode auto_edit",
        "gemini --output-format json --skip-trust --approval-mode auto_edit --sandbox=false",
        Login(
            ("GEMINI_API_KEY", "GEMINI_MODEL", "GOOGLE_API_KEY", "GOOGLE_CLOUD_*", "GOOGLE_GENAI_*"),
            (".gemini", ""),
            "oauth_creds.json",
            ("settings.json", "google_accounts.json", "gemini-credentials.json", ".env"),
        ),
    ),
}
OWN_LOGIN = Login(("*_API_KEY",))  # of a command of your own: only you know whose key it needs
SEARCHES = ("search", "tpe", "random")  # without a language model: search.py
PROMPT_FILE = "{prompt_file}"


def command_of(agent: str, *, is_contained: bool = False) -> tuple[str, ...]:
    """The words of a preset's or of your own command. UsageError if its program is not to be found."""
    preset, presets = PRESETS.get(agent), ", ".join([*PRESETS, *SEARCHES])
    command = agent if preset is None else preset.contained if is_contained else preset.command
    fix = f"Install it, or give {presets}, or a command that reads the prompt on stdin or {PROMPT_FILE}."
    return program_words("--agent", command, fix)


def program_words(flag: str, command: str, fix: str) -> tuple[str, ...]:
    """The words of a command; no shell is used. UsageError, which names `flag`, if its program is not to be found."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"{flag} {command!r} is no command ({error})", "Close its quotes.") from None
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"{flag} {command!r}: no program {words[0] if words else ''!r} on PATH", fix)
    return words

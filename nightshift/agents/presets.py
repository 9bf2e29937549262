"""The coding agents that are known by name: their commands, and the variables and files that they need."""

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nightshift.agents.sandbox import Environ, Login
from nightshift.errors import UsageError


@dataclass(frozen=True)
class Preset:
    """An agent's command and login."""

    command: str
    sandbox_options: tuple[str, str]  # replace {sandbox} in the command: without our sandbox, and in it
    login: Login
    effort: str = ""  # the program's option for --agent-effort; "" if it has none
    model: str = "--model "  # for --agent-model


_BEDROCK = " AWS_BEARER_TOKEN_BEDROCK AWS_REGION AWS_DEFAULT_REGION"

# Headless, with permission to edit. Checked against `--help` and the code of Claude Code 2.1.197, Codex CLI 0.169.0,
# Gemini CLI 0.61.0 and opencode 1.18.33. All read the prompt on stdin and print JSON.
# Their own sandboxes do not work inside a sandbox. With all tools, Claude's first request has 88 kB instead of 15.
# Without --skip-trust Gemini refuses a new folder; the variable GEMINI_SANDBOX would override its flag.
PRESETS = {
    "claude": Preset(
        "claude -p --output-format stream-json --verbose --tools Read,Edit,Write,Grep,Glob"
        " --permission-mode acceptEdits {sandbox}",
        ("", """--settings '{"sandbox":{"enabled":false}}'"""),
        Login(
            "ANTHROPIC_* CLAUDE_CODE_OAUTH_TOKEN CLAUDE_CODE_USE_* CLAUDE_CODE_SKIP_*_AUTH" + _BEDROCK,
            ".claude/.credentials.json",
            ".claude/settings.json",
            ((".claude", "CLAUDE_CONFIG_DIR"),),
            (
                ("CLAUDE_CODE_USE_BEDROCK CLAUDE_CODE_USE_MANTLE CLAUDE_CODE_USE_ANTHROPIC_AWS", "AWS_*"),
                ("CLAUDE_CODE_USE_VERTEX", "GOOGLE_* GCLOUD_PROJECT CLOUD_ML_REGION VERTEX_REGION_*"),
                ("CLAUDE_CODE_USE_FOUNDRY", "AZURE_*"),
            ),
        ),
        "--effort ",
    ),
    "codex": Preset(
        "codex exec --json --sandbox {sandbox} --skip-git-repo-check",
        ("workspace-write", "danger-full-access"),
        Login(
            "OPENAI_* CODEX_API_KEY CODEX_ACCESS_TOKEN AZURE_OPENAI_* OPENROUTER_API_KEY" + _BEDROCK,
            ".codex/auth.json",
            ".codex/config.toml",
            ((".codex", "CODEX_HOME"),),
        ),
        "-c model_reasoning_effort=",
    ),
    "gemini": Preset(
        "gemini --output-format json --skip-trust --approval-mode auto_edit {sandbox}",
        ("", "--sandbox=false"),
        Login(
            "GEMINI_[!CS]* GEMINI_CLI_CUSTOM_HEADERS GEMINI_CLI_USE_COMPUTE_ADC GOOGLE_API_KEY GOOGLE_GEMINI_*"
            " GOOGLE_VERTEX_* GOOGLE_CLOUD_* GOOGLE_GENAI_* CODE_ASSIST_*",
            ".gemini/oauth_creds.json",
            ".gemini/settings.json .gemini/google_accounts.json .gemini/gemini-credentials.json .gemini/.env",
            ((".", "GEMINI_CLI_HOME"),),
            (("GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_APPLICATION_CREDENTIALS"),),
        ),
    ),
    "opencode": Preset(
        "opencode run --format json",
        ("", ""),
        Login(
            """
                ANTHROPIC_* OPENAI_* AZURE_OPENAI_* AZURE_*RESOURCE_NAME GOOGLE_CLOUD_* GOOGLE_VERTEX_*
                GOOGLE_GENERATIVE_AI_* VERTEX_LOCATION OPENCODE_CONFIG_CONTENT OPENCODE_AUTH_CONTENT AI_GATEWAY_API_KEY
                AZURE_API_KEY AZURE_COGNITIVE_SERVICES_API_KEY CEREBRAS_API_KEY DASHSCOPE_API_KEY DEEPINFRA_API_KEY
                DEEPSEEK_API_KEY FIREWORKS_API_KEY GEMINI_API_KEY GOOGLE_API_KEY GROQ_API_KEY KIMI_API_KEY
                MINIMAX_API_KEY MISTRAL_API_KEY MOONSHOT_API_KEY NEBIUS_API_KEY NVIDIA_API_KEY OPENCODE_API_KEY
                OPENROUTER_API_KEY TOGETHER_API_KEY XAI_API_KEY ZAI_API_KEY ZHIPU_API_KEY
            """
            + _BEDROCK,
            ".local/share/opencode/auth.json",
            ".config/opencode/opencode.json .config/opencode/opencode.jsonc .config/opencode/config.json",
            ((".local/share", "XDG_DATA_HOME"), (".config", "XDG_CONFIG_HOME")),
            (("GOOGLE_CLOUD_LOCATION GOOGLE_VERTEX_LOCATION", "GOOGLE_APPLICATION_CREDENTIALS"),),
        ),
        "--variant ",
    ),
}
SEARCHES = ("tpe", "random")  # without a language model: search.py
PROMPT_FILE = "{prompt_file}"


def login_of(agent: str, environ: Environ, variables: Sequence[str], sees: Sequence[str]) -> Login:
    """Return the login of an agent with the `variables` of --agent-env and the paths `sees` of --agent-sees. Raises
    UsageError for a variable that is not set."""
    login = PRESETS[agent].login if agent in PRESETS else Login()
    for name in variables:
        if name not in environ:
            raise UsageError(f"--agent-env {name}: this variable is not set", f"Export {name}.")
    return replace(login, variables=" ".join((login.variables, *variables)), sees=tuple(sees))


def command_of(agent: str, *, is_contained: bool, model: str | None, effort: str | None) -> tuple[str, ...]:
    """Return the command of a preset, or your own command, as words. Raises UsageError if the program is not on PATH,
    or has no option for `model` or `effort`."""
    preset = PRESETS.get(agent) or Preset(agent, ("", ""), Login(), model="")
    command = preset.command
    if agent in PRESETS:
        command = command.replace("{sandbox}", preset.sandbox_options[is_contained])
    for flag, option, value in ("--agent-model", preset.model, model), ("--agent-effort", preset.effort, effort):
        if value and not option:
            raise UsageError(f"{flag}: Nightshift knows no such option of {agent}", "Write the option into --agent.")
        command += f" {option}{shlex.quote(value)}" if value else ""
    fix = f"Install it, or name {', '.join([*PRESETS, *SEARCHES])}, or a command that reads stdin or {PROMPT_FILE}."
    return program_words("--agent", command, fix)


def program_words(flag: str, command: str, fix: str) -> tuple[str, ...]:
    """Split a command into words, without a shell. Raises UsageError with `flag` if the program is not on PATH."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"{flag} {command!r} is not a command ({error})", "Close the quotes.") from None
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"{flag} {command!r}: no program {words[0] if words else ''!r} on PATH", fix)
    return words

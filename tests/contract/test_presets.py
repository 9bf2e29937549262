"""What holds for every agent that is known by name. A new preset needs a row in AGENTS, and recorded runs."""

import json
import stat
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nightshift.agents.presets import PRESETS, command_of
from nightshift.agents.usage import summary_of
from nightshift.campaign.records import Cost

RUNS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "agent-runs.json").read_text())
TOKEN, RENEWED = b'{"tokens": {"access": "old"}}', b'{"tokens": {"access": "new"}}'
SECRETS = """
    HF_TOKEN WANDB_API_KEY GITHUB_TOKEN SSH_AUTH_SOCK AWS_SECRET_ACCESS_KEY AZURE_CLIENT_SECRET
    GOOGLE_APPLICATION_CREDENTIALS GEMINI_SANDBOX NODE_OPTIONS LC_SECRET LD_PRELOAD PYTHONPATH DBUS_SESSION_BUS_ADDRESS
    NIGHTSHIFT_GSM8K
"""


class Expected(NamedTuple):
    """Of one agent: the name of its recorded runs, variables that go in, what a recorded proposal cost, its words for
    the model and the effort, and of each switch the secrets of a cloud that go in with it."""

    program: str
    variables: str
    cost: Cost
    effort: tuple[str, ...] | None
    clouds: dict[str, str]


AGENTS = {
    "claude": Expected(
        "Claude Code 2.1.197",
        "ANTHROPIC_API_KEY ANTHROPIC_BASE_URL ANTHROPIC_FOUNDRY_API_KEY CLAUDE_CODE_SKIP_BEDROCK_AUTH AWS_REGION",
        Cost(8_000, 160, 0.037),
        ("--effort", "high"),
        {
            "CLAUDE_CODE_USE_BEDROCK": "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_PROFILE",
            "CLAUDE_CODE_USE_VERTEX": "CLOUD_ML_REGION GOOGLE_APPLICATION_CREDENTIALS",
            "CLAUDE_CODE_USE_FOUNDRY": "AZURE_CLIENT_SECRET AZURE_TENANT_ID",
        },
    ),
    "codex": Expected(
        "Codex CLI 0.169.0",
        "CODEX_API_KEY OPENAI_BASE_URL AZURE_OPENAI_API_KEY OPENROUTER_API_KEY AWS_BEARER_TOKEN_BEDROCK",
        Cost(8_000, 160),
        ("-c", "model_reasoning_effort=high"),
        {},
    ),
    "gemini": Expected(
        "Gemini CLI 0.61.0",
        "GEMINI_API_KEY GEMINI_MODEL GOOGLE_GEMINI_BASE_URL CODE_ASSIST_ENDPOINT GOOGLE_CLOUD_PROJECT",
        Cost(10_000, 200),  # its router asks a model, too
        None,
        {"GOOGLE_GENAI_USE_VERTEXAI": "GOOGLE_APPLICATION_CREDENTIALS"},
    ),
    "opencode": Expected(
        "opencode 1.18.33",
        "OPENROUTER_API_KEY ANTHROPIC_API_KEY AZURE_RESOURCE_NAME AZURE_API_KEY GOOGLE_VERTEX_PROJECT",
        Cost(),
        ("--variant", "high"),
        {"GOOGLE_VERTEX_LOCATION": "GOOGLE_APPLICATION_CREDENTIALS"},
    ),
}


@pytest.mark.parametrize("agent", PRESETS)
class TestAgents:
    def test_its_files_go_in_from_where_they_are_and_its_credential_comes_back_and_nothing_else(self, agent, tmp_path):
        login, environ = PRESETS[agent].login, {"HOME": str(tmp_path / "home")}
        names = [login.credential, *login.settings.split()]
        inside, places = ([tmp_path / folder / name for name in names] for folder in ("inside", "home"))
        texts = [TOKEN, *map(str.encode, names[1:])]
        for place, text in zip(places, texts, strict=True):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(text)
        private = places[0].with_name("history.jsonl")
        private.write_text("private")
        before = login.copy_in(environ, tmp_path / "inside")
        assert before == TOKEN
        assert [path.read_bytes() for path in inside] == texts
        assert {path for path in (tmp_path / "inside").rglob("*") if path.is_file()} == {*inside}
        assert stat.S_IMODE(inside[0].stat().st_mode) == 0o600
        for path in (*inside, inside[0].with_name("hooks.json")):
            path.write_bytes(RENEWED)
        for _ in range(2):  # what came back already is no news
            assert login.take_back(environ, tmp_path / "inside", before) == ()
            before = RENEWED
        assert [place.read_bytes() for place in places] == [RENEWED, *texts[1:]]
        assert stat.S_IMODE(places[0].stat().st_mode) == 0o600
        assert {path for path in (tmp_path / "home").rglob("*") if path.is_file()} == {*places, private}

    def test_variables_that_it_needs_go_in_and_no_secret_but_those_of_the_cloud_that_it_uses(self, agent: str) -> None:
        login, clouds = PRESETS[agent].login, AGENTS[agent].clouds
        wanted = dict.fromkeys(AGENTS[agent].variables.split(), "x")
        assert login.chosen(wanted | dict.fromkeys(SECRETS.split(), "x")) == wanted
        for switch, names in clouds.items():
            environ = dict.fromkeys(names.split(), "x")
            assert login.chosen(environ) == {}
            assert login.chosen({**environ, switch: ""}).keys() <= {switch}
            assert login.chosen({**environ, switch: "1"}) == {**environ, switch: "1"}

    def test_it_gets_model_and_effort(self, agent, tmp_path, monkeypatch) -> None:
        (tmp_path / agent).touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        effort = AGENTS[agent].effort
        for is_contained in (False, True):
            words = command_of(agent, is_contained=is_contained, model="opus 5", effort="high" if effort else None)
            assert words[-4 if effort else -2 :] == ("--model", "opus 5", *(effort or ()))

    def test_words_and_cost_of_a_recorded_proposal_are_read(self, agent: str) -> None:
        cases, expected = ("ok", "ok-tools", "ok-stream"), AGENTS[agent]
        outputs = [r["output"] for r in RUNS if r["program"] == expected.program and r["case"] in cases]
        summaries = {summary_of(output) for output in outputs}
        assert summaries == {("I raised trainer.optim.lr and wrote hypothesis.txt.", expected.cost)}

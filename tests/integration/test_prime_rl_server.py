"""The client of the vLLM server, against a stand-in that answers as the real one was recorded, or misbehaves."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nightshift.campaign.records import Completion
from nightshift.config.rules import Decoding
from nightshift.engines.prime_rl import server as prime_rl_server
from nightshift.engines.prime_rl.server import Server
from nightshift.errors import EngineError
from tests.stand_in_server import StandInServer
from tests.waiting import HANG_SECONDS, Clock

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests" / "fixtures" / "prime_rl" / "http.json").read_text())
GREEDY = Decoding(max_completion_tokens=64)


def prompt(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def client(port: int) -> Server:
    return Server(port, time.monotonic() + HANG_SECONDS)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def stand_in() -> Iterator[StandInServer]:
    with StandInServer(MODEL) as server:
        yield server


@pytest.fixture
def server(stand_in: StandInServer) -> Iterator[Server]:
    server = client(stand_in.port)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_rl_server, "BACKOFF_SECONDS", 0.02)
    monkeypatch.setattr(prime_rl_server, "HEALTH_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(prime_rl_server, "_TICK_SECONDS", 0.05)


def complete(server: Server, num: int = 3, seconds: list[int] | None = None) -> list[Completion]:
    readings = seconds if seconds is not None else []
    return server.complete([prompt(f"{i}+1=") for i in range(num)], GREEDY, MODEL, readings.append)


def shape(value: Any) -> Any:
    """Keys and types, as far as the client depends on them."""
    if isinstance(value, dict):
        return {
            k: shape(v) for k, v in value.items() if k in ("choices", "message", "content", "finish_reason", "usage")
        }
    return [shape(item) for item in value] if isinstance(value, list) else type(value)


def test_the_stand_in_answers_what_was_recorded(weights: Path) -> None:
    requests = [entry for entry in RECORDED if "status" in entry]
    assert len(requests) > 20
    recorded_model = "/home/user/model/tiny-qwen3"
    with StandInServer(recorded_model) as stand_in, httpx.Client(trust_env=False) as http:
        for entry in requests:
            body = entry["body"]
            if body and "weight_dir" in body and entry["status"] == 200:
                body = {"weight_dir": str(weights)}
            url = f"http://127.0.0.1:{stand_in.port}{entry['path']}"
            answer = http.request(entry["method"], url, json=body)
            assert answer.status_code == entry["status"], entry["name"]
            if entry["path"] == "/v1/chat/completions" and entry["status"] == 200:
                assert shape(answer.json()) == shape(entry["response"]), entry["name"]
            elif entry["path"] in ("/pause", "/resume") or entry["name"].startswith("update to"):
                assert answer.json() == entry["response"], entry["name"]


def test_weights_are_loaded_between_pause_and_resume(stand_in: StandInServer, server: Server, weights: Path) -> None:
    stand_in.running.clear()  # the orchestrator died between its own pause and resume
    server.load_weights(weights, MODEL)
    paths = [path for path, _ in stand_in.requests]
    assert paths == ["/resume", "/pause", "/update_weights", "/resume"]
    assert stand_in.weight_dir == str(weights)
    assert stand_in.running.is_set()


def test_an_adapter_is_loaded_under_its_own_name(stand_in: StandInServer, server: Server, weights: Path) -> None:
    (weights / "adapter_config.json").write_text("{}")
    server.load_weights(weights, "r16-a32")
    assert stand_in.adapters == {"r16-a32": str(weights)}
    assert stand_in.weight_dir is None
    assert [path for path, _ in stand_in.requests] == ["/resume", "/load_lora_adapter"]


def test_weights_that_cannot_be_loaded_are_an_error(stand_in, server, weights, monkeypatch):
    stand_in.fault = "update_500"
    with pytest.raises(EngineError, match=r"answered /update_weights with 500: \{.error.: .*collective_rpc"):
        server.load_weights(weights, MODEL)
    stand_in.fault = "update_hang"
    monkeypatch.setattr(prime_rl_server, "ADMIN_SECONDS", 0.2)
    with pytest.raises(EngineError, match="did not answer /update_weights within 0 s: ReadTimeout"):
        server.post("/update_weights")


def test_every_prompt_is_answered_once_in_order(stand_in: StandInServer, server: Server) -> None:
    num = prime_rl_server.CONCURRENCY + 188
    readings: list[int] = []
    completions = complete(server, num, readings)
    assert [c.text for c in completions] == [str(i + 1) for i in range(num)]
    assert {(c.num_tokens, c.truncated) for c in completions} == {(2, False)}
    assert stand_in.num_chats == num
    assert readings == sorted(readings)
    assert readings[-1] == num


def test_nothing_of_the_sampling_is_left_to_the_server(stand_in: StandInServer, server: Server) -> None:
    """vLLM fills what is missing from the model's generation_config.json: Qwen2.5 ships a repetition penalty."""
    for _ in range(2):
        server.complete([prompt("3+4=")], Decoding(max_completion_tokens=7, temperature=0.6), MODEL, print)
    (path, body), (_, again) = stand_in.requests
    assert path == "/v1/chat/completions"
    assert body.pop("cache_salt") != again["cache_salt"]
    assert body == {
        "model": MODEL, "messages": prompt("3+4="), "max_completion_tokens": 7, "temperature": 0.6, "top_p": 1.0,
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "n": 1, "seed": 0, "stream": False,
    }  # fmt: skip


def test_an_answer_cut_by_the_token_limit_is_truncated() -> None:
    with StandInServer(MODEL, answer=lambda content: "one two three") as stand_in:
        server = client(stand_in.port)
        got = [server.complete([prompt("q")], Decoding(n), MODEL, print)[0] for n in (3, 4)]
        stand_in.fault = "null_content"
        got += server.complete([prompt("q")], Decoding(4), MODEL, print)
        server.close()
    assert got[:2] == [Completion("one two three", 3, True), Completion("one two three", 4, False)]
    assert got[2].text == ""


def test_connections_that_break_are_tried_again(stand_in: StandInServer, server: Server) -> None:
    stand_in.fault = "cut_once"
    assert [c.text for c in complete(server, 20)] == [str(i + 1) for i in range(20)]
    assert stand_in.num_chats == 25


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("cut_always", "the connection broke 4 times: RemoteProtocolError"),
        ("chat_500", "status 500: .*EngineCore died"),
        ("wrong_model", "answered by model another/model instead of Qwen"),
        ("finish_abort", "Invalid enum value 'abort'"),
    ],
)
def test_an_answer_that_is_no_completion_ends_the_evaluation(stand_in, server, fault, cause):
    stand_in.fault = fault
    with pytest.raises(EngineError, match=rf"prompt \d+: {cause}") as error:
        complete(server)
    assert len(str(error.value)) < 400
    assert str(error.value).isprintable()
    stand_in.fault = None
    assert len(complete(server)) == 3  # the client is as good as new


def test_a_request_that_the_server_refuses_is_named(server: Server) -> None:
    with pytest.raises(EngineError, match=r"prompt 1: status 400: .*maximum context length"):
        server.complete([prompt("1+1="), prompt("x" * 600)], GREEDY, MODEL, print)


def test_the_deadline_of_the_run_ends_everything(stand_in: StandInServer, weights: Path) -> None:
    stand_in.fault, clock = "chat_hang", Clock()
    clock.step = 0.1  # a look
    server = Server(stand_in.port, 0.5, clock)
    with pytest.raises(EngineError, match="reached the deadline of the run: 0 answers were finished"):
        server.complete([prompt("1+1=")], GREEDY, MODEL, server.raise_if_late)
    with pytest.raises(EngineError, match="no time is left for /resume"):
        server.load_weights(weights, MODEL)
    server.close()


def test_proxies_of_the_environment_are_not_used(stand_in: StandInServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    server = client(stand_in.port)
    assert server.is_healthy()
    assert len(complete(server)) == 3
    server.close()

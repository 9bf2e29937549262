"""A stand-in for the vLLM server of a prime-rl run: no model, but its endpoints, and faults on demand.

Statuses and shapes are those of tests/fixtures/prime_rl/http.json, recorded from the real server.
"""

from __future__ import annotations

import json
import re
import socketserver
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any

Answer = Callable[[str], str]
Step = Callable[[str], int]  # of the weights that are served under a name


def logprob(token: int, step: int) -> float:
    """Made up, and other for each step."""
    return -1 - (token % 13) / 10 - step * (1 + token % 5) / 100


def add_up(content: str) -> str:
    """`3+4=` is 7; anything else is answered with `#### 0`."""
    numbers = re.findall(r"\d+", content) if re.fullmatch(r"[\d+ =?]+", content) else []
    return str(sum(map(int, numbers))) if numbers else "#### 0"


class StandInServer:
    """A server on a loopback port. As a context manager it serves from a thread of the test.

    `fault`: a word that is looked up below. `cut_once`: the connection ends in the middle of the first five answers.
    """

    def __init__(
        self,
        model: str,
        port: int = 0,
        fault: str | None = None,
        answer: Answer = add_up,
        max_model_len: int = 512,
        step: Step = lambda model: 0,
    ) -> None:
        """`port` 0 takes a free one. `fault` may be changed while it serves."""
        self.model, self.fault, self.answer, self.max_model_len = model, fault, answer, max_model_len
        self.requests: list[tuple[str, dict[str, Any]]] = []  # (path, body), as they came
        self.step = step
        self.lags: dict[str, int] = {}  # steps by which a data-parallel engine is behind, by its number
        self.weight_dir: str | None = None
        self.adapters: dict[str, str] = {}
        self.num_chats = self.num_cut = 0
        self.running = threading.Event()  # cleared while paused
        self.running.set()
        self.closing = threading.Event()
        self.lock = threading.Lock()
        owner = self

        class Handler(_Handler):
            stand_in = owner

        self._http = _Http(("127.0.0.1", port), Handler)
        self.port = int(self._http.server_address[1])
        self._thread = threading.Thread(target=self.serve, daemon=True)

    def serve(self) -> None:
        self._http.serve_forever(poll_interval=0.05)

    def close(self) -> None:
        self.closing.set()
        self.running.set()
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> StandInServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        self._thread.join()

    def chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and answer of a chat request; waits while paused."""
        messages, salt = body.get("messages"), body.get("cache_salt", "-")
        if not isinstance(messages, list):
            return _error(400, "1 validation error: messages should be a valid list")
        if salt == "":
            return _error(400, "Parameter 'cache_salt' must be a non-empty string if provided.")
        if body.get("model") not in (self.model, *self.adapters):
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        content = str(messages[-1]["content"])
        num_prompt = 10 + len(content)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or self.max_model_len
        if limit > self.max_model_len or num_prompt > self.max_model_len:
            return _error(400, f"longer than the model's maximum context length of {self.max_model_len} tokens")
        self.running.wait()
        tokens = [*re.findall(r"\S+\s*", self.answer(content)), "<end>"]  # a word is a token here
        truncated = len(tokens) > limit
        text = "".join(tokens[: limit if truncated else -1])
        answer = self._completion(str(body["model"]), text, truncated, min(len(tokens), limit))
        if not body.get("prompt_logprobs"):
            return 200, answer
        if self.fault == "logprobs_400":
            return _error(400, "Requested prompt logprobs of 1, which is greater than max allowed: 0")
        return 200, answer | self.prompt_logprobs(str(body["model"]), messages, body.get("engine", ""))

    def prompt_logprobs(self, model: str, messages: list[dict[str, str]], engine: str) -> dict[str, Any]:
        """As vLLM adds them to an answer: each token, and the likeliest, by its id; nothing for the first one."""
        tokens = [ord(character) for message in messages for character in f"{message['role']}:{message['content']}"]
        step = self.step(model) - self.lags.get(engine, 0)
        likeliest = {"99999": {"logprob": -0.1, "rank": 1, "decoded_token": "x"}}
        rows: list[Any] = [
            {str(token): {"logprob": logprob(token, step), "rank": 9, "decoded_token": chr(token)}} | likeliest
            for token in tokens
        ]
        rows[0] = None
        if self.fault == "logprobs_another_token":
            rows[5] = likeliest
        return {"prompt_logprobs": rows, "prompt_token_ids": tokens}

    def _completion(self, model: str, text: str, truncated: bool, num_tokens: int) -> Any:
        fault = self.fault
        content = None if fault == "null_content" else text
        reason = "abort" if fault == "finish_abort" else "length" if truncated else "stop"
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": reason}
        usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": 1 + num_tokens}
        return {
            "id": "chatcmpl-stand-in",
            "object": "chat.completion",
            "created": 0,
            "model": "another/model" if fault == "wrong_model" else model,
            "choices": [choice],
            "usage": usage,
        }

    def update(self, body: dict[str, Any]) -> tuple[int, Any]:
        folder = body.get("weight_dir")
        if self.fault == "update_500" or folder is None or not list(Path(folder).glob("*.safetensors")):
            return _error(500, f"Call to collective_rpc method failed: Worker failed with error '{folder}'")
        self.weight_dir = folder
        return 200, {"status": "ok"}

    def load_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not Path(body["lora_path"], "adapter_config.json").is_file():
            return _error(404, f"No adapter found for {body['lora_path']}")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, {"status": "ok"}


class _Http(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    request_queue_size = 1024  # hundreds of connections come at once
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandInServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the harness's log is for what matters."""

    def do_GET(self) -> None:
        server, path = self.stand_in, self.path.partition("?")[0]
        if path == "/health":
            self._send(200, None)
        elif path == "/liveness":
            self._send(200, {"status": "ok"})
        elif path == "/v1/models":
            names = [server.model, *server.adapters]
            models = [{"id": name, "object": "model", "max_model_len": server.max_model_len} for name in names]
            self._send(200, {"object": "list", "data": models})
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        server, path = self.stand_in, self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if engine := self.headers.get("X-data-parallel-rank"):
            body["engine"] = engine
        server.requests.append((path, body))
        hanging = {"/update_weights": "update_hang", "/v1/chat/completions": "chat_hang"}
        if server.fault is not None and server.fault == hanging.get(path):
            server.closing.wait()
        if path == "/pause":
            server.running.clear()
            self._send(200, {"status": "paused"})
        elif path == "/resume":
            server.running.set()
            self._send(200, {"status": "resumed"})
        elif path == "/update_weights":
            self._send(*server.update(body))
        elif path == "/load_lora_adapter":
            self._send(*server.load_adapter(body))
        elif path == "/v1/chat/completions":
            self._chat(body)
        else:
            self._send(404, {"detail": "Not Found"})

    def _chat(self, body: dict[str, Any]) -> None:
        server = self.stand_in
        with server.lock:
            server.num_chats += 1
            cut = server.fault == "cut_always" or (server.fault == "cut_once" and server.num_cut < 5)
            server.num_cut += cut
        status, answer = _error(500, "EngineCore died") if server.fault == "chat_500" else server.chat(body)
        data = json.dumps(answer).encode()
        if cut:
            self._send_bytes(200, data[: len(data) // 2], len(data))
            self.close_connection = True
        else:
            self._send_bytes(status, data, len(data))

    def _send(self, status: int, answer: Any) -> None:
        data = b"" if answer is None else json.dumps(answer).encode()
        self._send_bytes(status, data, len(data))

    def _send_bytes(self, status: int, data: bytes, length: int) -> None:
        head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        self.wfile.write(head.encode() + data)


def _error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "Error", "param": None, "code": status}}

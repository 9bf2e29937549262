"""A scripted model that Claude Code talks to: `scripted_models.py FOLDER -- COMMAND`, in a network of its own.

It listens on 127.0.0.1:8000, runs COMMAND and exits with its code. As the model it reads train.toml with the program's
own tool, raises `lr` from 3e-6, writes hypothesis.txt and says one sentence; the conversation tells how far it is.
FOLDER/requests.jsonl gets a line a request: what was answered, and the whole prompt.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
WORKING_FOLDER = re.compile(r"(?:[Ww]orking [Dd]irectory|<cwd>|cwd)[^/\n]{0,40}?(/[^\s\"'<>`\\]+)")
Block = dict[str, Any]


def read(value: object, texts: list[str], results: list[str]) -> None:
    """Sort all text of a request by who said it: people and the model, or a tool."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, list):
        for each in value:
            read(each, texts, results)
    elif isinstance(value, dict) and value.get("type") == "tool_result":
        parts: list[str] = []
        read(value.get("content"), parts, parts)
        results.append("\n".join(parts))
    elif isinstance(value, dict):
        for key in ("text", "content"):
            read(value.get(key), texts, results)


def next_block(body: dict[str, Any], texts: list[str], results: list[str]) -> Block:
    """What the model does next: text, or the use of a tool."""
    folders = WORKING_FOLDER.findall("\n".join(texts))
    folder = Path(folders[-1].rstrip(".,") if folders else "")
    config = str(folder / "train.toml")
    if not body.get("tools"):  # a title, a summary
        return {"type": "text", "text": "Learning rate"}
    if len(results) == 0:
        return use("Read", file_path=config)
    if len(results) == 1:
        return use("Edit", file_path=config, old_string="lr = 3e-6", new_string="lr = 4.5e-06")
    if len(results) == 2:
        answer = "HYPOTHESIS: a larger learning rate learns more in the same steps\nPREDICTION: +1.0 pp\nLESSON: none\n"
        return use("Write", file_path=str(folder / "hypothesis.txt"), content=answer)
    return {"type": "text", "text": "I raised trainer.optim.lr and wrote hypothesis.txt."}


def use(name: str, **arguments: str) -> Block:
    return {"type": "tool_use", "id": f"toolu_{time.time_ns()}", "name": name, "input": arguments}


def _event(kind: str, **data: object) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"


def messages(block: Block, model: str) -> str:
    """The stream of an answer of Anthropic's Messages."""
    usage = {"input_tokens": 1200, "output_tokens": 40, "cache_read_input_tokens": 800}
    usage["cache_creation_input_tokens"] = 0
    message = {"id": f"msg_{time.time_ns()}", "type": "message", "role": "assistant", "model": model}
    ended = {"stop_reason": "tool_use" if "input" in block else "end_turn", "stop_sequence": None}
    if "input" in block:
        empty = block | {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    else:
        empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
    begun = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    events = [
        _event("message_start", message=begun),
        _event("content_block_start", index=0, content_block=empty),
        _event("content_block_delta", index=0, delta=delta),
        _event("content_block_stop", index=0),
        _event("message_delta", delta=ended, usage=usage),
        _event("message_stop"),
    ]
    return "".join(events)


class Handler(BaseHTTPRequestHandler):
    """One request; its path tells the API."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def _answer(self, status: int, text: str, kind: str = "application/json") -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        data, path = self.rfile.read(int(self.headers.get("Content-Length") or 0)), self.path.partition("?")[0]
        self.close_connection = True
        if not path.endswith("/messages"):  # a count of tokens, and whatever else is posted
            return self._answer(200, '{"input_tokens": 1000}')
        if not any(self.headers.get(name) for name in ("Authorization", "x-api-key")):
            return self._answer(401, '{"error": {"message": "no credentials"}}')
        body = json.loads(data)
        texts: list[str] = []
        results: list[str] = []
        for key in ("system", "messages"):
            read(body.get(key), texts, results)
        block = next_block(body, texts, results)
        with (self.folder / "requests.jsonl").open("a") as file:
            file.write(json.dumps({"answer": block, "prompt": "\n".join(texts)}) + "\n")
        return self._answer(200, messages(block, body["model"]), "text/event-stream")

    def log_message(self, *args: object) -> None:
        """Nothing on stderr."""


def main() -> int:
    Handler.folder = Path(sys.argv[1])
    with ThreadingHTTPServer(("127.0.0.1", PORT), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return subprocess.run(sys.argv[3:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

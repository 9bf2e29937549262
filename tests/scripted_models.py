"""A scripted model that Claude Code talks to: `scripted_models.py FOLDER -- COMMAND`, in a network of its own.

It listens on 127.0.0.1:8000, runs COMMAND and exits with its code. As the model it reads train.toml with the program's
own tool, raises `lr` from 3e-6, writes hypothesis.txt and says one sentence; the conversation tells how far it is.
FOLDER/tools gets a line for each tool that the model uses.
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
HYPOTHESIS = "HYPOTHESIS: a larger learning rate learns more in the same steps\nPREDICTION: +1.0 pp\nLESSON: none\n"
Block = dict[str, Any]


def next_block(body: dict[str, Any]) -> Block:
    """What the model does next: text, or the use of a tool."""
    if not body.get("tools"):  # a title, a summary
        return {"type": "text", "text": "Learning rate"}
    said = json.dumps([body.get("system"), body["messages"]])
    folder = Path(WORKING_FOLDER.findall(said)[-1].rstrip(".,"))
    config = str(folder / "train.toml")
    steps = [
        ("Read", {"file_path": config}),
        ("Edit", {"file_path": config, "old_string": "lr = 3e-6", "new_string": "lr = 4.5e-06"}),
        ("Write", {"file_path": str(folder / "hypothesis.txt"), "content": HYPOTHESIS}),
    ]
    num_done = said.count('"type": "tool_result"')
    if num_done == len(steps):
        return {"type": "text", "text": "I raised trainer.optim.lr and wrote hypothesis.txt."}
    name, arguments = steps[num_done]
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

    folder: Path

    def _answer(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        data, path = self.rfile.read(int(self.headers.get("Content-Length") or 0)), self.path.partition("?")[0]
        if not path.endswith("/messages"):  # a count of tokens, and whatever else is posted
            return self._answer(200, '{"input_tokens": 1000}')
        if not any(self.headers.get(name) for name in ("Authorization", "x-api-key")):
            return self._answer(401, '{"error": {"message": "no credentials"}}')
        body = json.loads(data)
        block = next_block(body)
        if "name" in block:
            with (self.folder / "tools").open("a") as file:
                file.write(block["name"] + "\n")
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

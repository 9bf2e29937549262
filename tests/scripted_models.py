"""A scripted model that real agent programs talk to: `scripted_models.py FOLDER -- COMMAND`, in a network of its own.

It listens on 127.0.0.1:8000, runs COMMAND and exits with its code. It speaks the Anthropic Messages, the OpenAI
Responses and Chat Completions, and the Gemini API. As the model it reads train.toml with the program's own tool,
raises `lr`, writes hypothesis.txt and says one sentence; the conversation tells how far it is. FOLDER/requests.jsonl
gets a line a request: what was answered, the path, the whole prompt.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
LR = re.compile(r"^[^\n|]*?\b(lr = (\S+))", re.MULTILINE)
WORKING_FOLDER = re.compile(
    r"(?:[Ww]orking [Dd]irectory|working in the directory|<cwd>|cwd|Workspace root folder|workspace folder"
    r"|Workspace Directories:?\s*-?)[^/\n]{0,40}?(/[^\s\"'<>`\\]+)"
)
# The programs' own names of a tool, and of its arguments.
TOOLS = {"read": ("Read", "read", "read_file"), "edit": ("Edit", "edit", "replace"),
         "write": ("Write", "write", "write_file")}  # fmt: skip
ARGUMENTS = {
    "path": ("file_path", "filePath", "absolute_path", "path"),
    "old": ("old_string", "oldString", "oldText"),
    "new": ("new_string", "newString", "newText"),
    "text": ("content",),
}
Step = dict[str, str]


@dataclass
class Request:
    """What a request holds: the schemas of its tools by name, what tools have answered, all its text."""

    model: str
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    schema: dict[str, Any] = field(default_factory=dict)  # of the JSON that the answer has to be

    @property
    def folder(self) -> Path:
        folders = WORKING_FOLDER.findall("\n".join(self.texts))
        return Path(folders[-1].rstrip(".,") if folders else "")


def parse(body: dict[str, Any], path: str) -> Request:
    in_path = re.search(r"/models/([^:/?]+)", path)
    request = Request(body.get("model") or (in_path[1] if in_path else "scripted"))
    for tool in body.get("tools") or []:
        for each in tool.get("functionDeclarations") or [tool.get("function") or tool]:
            schema = each.get("input_schema") or each.get("parameters") or each.get("parametersJsonSchema") or {}
            request.tools[each.get("name", "")] = {**schema, "kind": tool.get("type")}
    request.tools.pop("", None)
    for key in ("system", "instructions", "systemInstruction", "messages", "input", "contents"):
        _walk(body.get(key), request)
    form = body.get("generationConfig") or {}
    request.schema = form.get("responseJsonSchema") or form.get("responseSchema") or {}
    return request


def _walk(value: object, request: Request) -> None:
    if isinstance(value, str):
        request.texts.append(value)
    elif isinstance(value, list):
        for each in value:
            _walk(each, request)
    elif isinstance(value, dict):
        kind = value.get("type") or value.get("role")
        if kind in ("tool_result", "tool", "function_call_output", "custom_tool_call_output"):
            request.results.append(_text(value.get("content", value.get("output"))))
        elif "functionResponse" in value:
            request.results.append(_text(value["functionResponse"].get("response")))
        else:
            for key in ("text", "content", "parts"):
                _walk(value.get(key), request)


def _text(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    if isinstance(value, dict):
        return _text(value.get("text") or value.get("output") or value.get("content") or "")
    return value if isinstance(value, str) else ""


def next_step(request: Request) -> Step:
    """What the model does next: `say` a text, or the name of a tool with its arguments."""
    done, folder = len(request.results), request.folder
    if not request.tools:  # a title, a summary
        return {"say": "Learning rate"}
    if done == 0:
        return {"tool": "read", "path": str(folder / "train.toml")}
    if done == 1:
        lr = LR.search(request.results[0])
        old, value = (lr[1], float(lr[2])) if lr else ("lr = 3e-6", 3e-6)
        return {"tool": "edit", "path": str(folder / "train.toml"), "old": old, "new": f"lr = {1.5 * value:.4g}"}
    if done == 2:
        answer = "HYPOTHESIS: a larger learning rate learns more in the same steps\nPREDICTION: +1.0 pp\nLESSON: none\n"
        return {"tool": "write", "path": str(folder / "hypothesis.txt"), "text": answer}
    return {"say": "I raised trainer.optim.lr and wrote hypothesis.txt."}


def call(step: Step, request: Request) -> tuple[str, Any]:
    """The name and arguments of the program's own tool for a step; of a tool that takes free text, the text."""
    kind, path = step["tool"], step["path"]
    for name in TOOLS[kind]:
        if name in request.tools:
            known = request.tools[name].get("properties", {})
            arguments: dict[str, Any] = {
                next((n for n in names if n in known), names[0]): step[key]
                for key, names in ARGUMENTS.items()
                if key in step
            }
            if kind == "edit" and "edits" in known:  # pi
                arguments = {"path": path, "edits": [{"oldText": step["old"], "newText": step["new"]}]}
            if "instruction" in known:  # Gemini CLI
                arguments["instruction"] = "Raise the learning rate."
            return name, arguments
    if kind == "write" and "apply_patch" in request.tools:  # Codex
        added = "".join(f"+{line}\n" for line in step["text"].splitlines())
        patch = f"*** Begin Patch\n*** Add File: {path}\n{added}*** End Patch"
        return "apply_patch", patch if request.tools["apply_patch"].get("kind") == "custom" else {"input": patch}
    words = f"cat {path}" if kind == "read" else f"sed -i 's/{step.get('old')}/{step.get('new')}/' {path}"
    words = f"printf '%s' '{step['text']}' > {path}" if kind == "write" else words
    name = next(n for n in ("exec_command", "shell_command", "shell", "local_shell") if n in request.tools)
    known = request.tools[name].get("properties", {})
    key = "cmd" if "cmd" in known else "command"
    return name, {key: ["bash", "-lc", words] if known.get(key, {}).get("type") == "array" else words}


def _event(kind: str, **data: object) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"


def anthropic(step: Step, request: Request, streams: bool) -> list[str]:
    """Messages."""
    usage = {"input_tokens": 1200, "output_tokens": 40, "cache_read_input_tokens": 800}
    usage["cache_creation_input_tokens"] = 0
    if "say" in step:
        stop, block, empty = "end_turn", {"type": "text", "text": step["say"]}, {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": step["say"]}
    else:
        name, arguments = call(step, request)
        stop, block = "tool_use", {"type": "tool_use", "id": f"toolu_{time.time_ns()}", "name": name}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(arguments)}
        block, empty = {**block, "input": arguments}, {**block, "input": {}}  # type: ignore[dict-item]
    message = {"id": f"msg_{time.time_ns()}", "type": "message", "role": "assistant", "model": request.model}
    ended = {"stop_reason": stop, "stop_sequence": None}
    if not streams:
        return [json.dumps({**message, "content": [block], **ended, "usage": usage})]
    begun = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    return [
        _event("message_start", message=begun),
        _event("content_block_start", index=0, content_block=empty),
        _event("content_block_delta", index=0, delta=delta),
        _event("content_block_stop", index=0),
        _event("message_delta", delta=ended, usage=usage),
        _event("message_stop"),
    ]


def responses(step: Step, request: Request, streams: bool) -> list[str]:
    """OpenAI Responses."""
    uid = time.time_ns()
    item: dict[str, Any] = {"status": "completed", "call_id": f"call_{uid}"}
    if "say" in step:
        part = {"type": "output_text", "text": step["say"], "annotations": []}
        item = {"type": "message", "id": f"msg_{uid}", "role": "assistant", "status": "completed", "content": [part]}
    else:
        name, given = call(step, request)
        item |= {"type": "function_call", "id": f"fc_{uid}", "name": name, "arguments": json.dumps(given)}
        if isinstance(given, str):
            item |= {"type": "custom_tool_call", "input": given}
    usage = {"input_tokens": 2000, "input_tokens_details": {"cached_tokens": 800}, "output_tokens": 40}
    usage |= {"output_tokens_details": {"reasoning_tokens": 10}, "total_tokens": 2040}
    base = {"id": f"resp_{uid}", "object": "response", "created_at": int(time.time()), "model": request.model}
    whole = {**base, "status": "completed", "output": [item], "usage": usage}
    if not streams:
        return [json.dumps(whole)]
    return [
        _event("response.created", response={**base, "status": "in_progress", "output": []}),
        _event("response.output_item.added", output_index=0, item=item),
        _event("response.output_item.done", output_index=0, item=item),
        _event("response.completed", response=whole),
    ]


def chat(step: Step, request: Request, streams: bool) -> list[str]:
    """OpenAI Chat Completions."""
    message: dict[str, Any] = {"role": "assistant", "content": step.get("say")}
    if "say" not in step:
        name, arguments = call(step, request)
        function = {"name": name, "arguments": json.dumps(arguments)}
        message["tool_calls"] = [{"index": 0, "id": f"call_{time.time_ns()}", "type": "function", "function": function}]
    stop = "stop" if "say" in step else "tool_calls"
    usage = {"prompt_tokens": 2000, "completion_tokens": 40, "total_tokens": 2040}
    base = {"id": f"chatcmpl-{time.time_ns()}", "created": int(time.time()), "model": request.model, "usage": usage}
    if not streams:
        choice = {"index": 0, "message": message, "finish_reason": stop}
        return [json.dumps({**base, "object": "chat.completion", "choices": [choice]})]
    choice = {"index": 0, "delta": message, "finish_reason": stop}
    chunk = {**base, "object": "chat.completion.chunk", "choices": [choice]}
    return [f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"]


def gemini(step: Step, request: Request, streams: bool) -> list[str]:
    """generateContent and streamGenerateContent."""
    usage = {"promptTokenCount": 2000, "candidatesTokenCount": 40, "totalTokenCount": 2040}
    usage["cachedContentTokenCount"] = 800
    if "say" in step:
        parts = [{"text": json.dumps(_example(request.schema)) if request.schema else step["say"]}]
    else:
        name, arguments = call(step, request)
        parts = [{"functionCall": {"name": name, "args": arguments}}]  # type: ignore[dict-item]
    candidate = {"content": {"role": "model", "parts": parts}, "finishReason": "STOP", "index": 0}
    whole = json.dumps({"candidates": [candidate], "usageMetadata": usage, "modelVersion": request.model})
    return [f"data: {whole}\r\n\r\n" if streams else whole]


def _example(schema: dict[str, Any]) -> object:
    """The least that a JSON schema takes: Gemini CLI asks which model to use."""
    kind = str(schema.get("type", "")).lower()
    if schema.get("enum"):
        return schema["enum"][0]
    if kind == "object":
        return {name: _example(each) for name, each in schema.get("properties", {}).items()}
    return {"array": [], "boolean": False, "integer": 1, "number": 1.0}.get(kind, "as asked")


Wire = Callable[[Step, Request, bool], list[str]]


def wire_of(path: str) -> Wire | None:
    path = path.split("?")[0].rstrip("/")
    for end, wire in (("/messages", anthropic), ("/responses", responses), ("/chat/completions", chat)):
        if path.endswith(end):
            return wire
    return gemini if re.search(r":(stream)?[gG]enerateContent$", path) else None


class Handler(BaseHTTPRequestHandler):
    """One request; its path tells the API."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def _answer(self, status: int, body: object) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        named = {"Content-Type": "application/json", "Content-Length": str(len(data)), "Connection": "close"}
        for name, value in named.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """A list of models. Codex asks for a web socket first; 426 sends it to HTTP at once."""
        models = {"object": "list", "data": [{"id": "scripted", "object": "model"}], "models": []}
        self._answer(426 if "/responses" in self.path else 200 if "/models" in self.path else 404, models)

    def do_HEAD(self) -> None:
        self._answer(200, "")

    def do_POST(self) -> None:
        data, wire = self.rfile.read(int(self.headers.get("Content-Length") or 0)), wire_of(self.path)
        if wire is None:  # a count of tokens, and whatever else is posted
            return self._answer(200, {"input_tokens": 1000, "totalTokens": 1000})
        if self.headers.get("Content-Encoding"):  # Codex compresses until it is refused
            return self._answer(415, {})
        body = json.loads(data)
        request = parse(body, self.path)
        step: Step | str = next_step(request)
        if not any(self.headers.get(name) for name in ("Authorization", "x-api-key", "x-goog-api-key")):
            step = "auth"
        line = {"answer": step, "path": self.path, "prompt": "\n".join(request.texts)}
        with (self.folder / "requests.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.close_connection = True
        if isinstance(step, str):
            return self._answer(401, {"error": {"message": "no credentials"}})
        streams = bool(body.get("stream")) or "streamGenerateContent" in self.path
        parts = wire(step, request, streams)
        if not streams:
            return self._answer(200, parts[0])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for part in parts:
            self.wfile.write(part.encode())
        return None

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

"""The skeleton that `new environment` writes, and the checks of `doctor --environment`."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from threading import Thread

from nightshift.config.rules import RULES_NAME
from nightshift.config.rules_toml import NAME, environments_named
from nightshift.errors import UsageError
from nightshift.evaluation.environment import Environment, Example, load
from nightshift.text import clean

NUM_EXAMPLES = 20
_SKELETON, _SKELETON_TURNS = "docs/environment", "docs/environment_turns"
_NUM_EPISODES = 2
_FIX = "Correct the code of the environment, then run this again."
# Arguments of a tool call by their type in JSON Schema; every other type is a string.
_ARGUMENTS = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


def create(root: Path, name: str, has_turns: bool = False) -> list[str]:
    """Write environments/NAME, which can be trained without a change, with a test. Return lines with the next steps.

    `has_turns`: a verifiers environment of two turns, for prime-rl.
    """
    if not NAME.fullmatch(name):
        raise UsageError(f"{json.dumps(name)} is not a valid name", "Use up to 40 of a-z, 0-9 and _.")
    target, skeleton = root / "environments" / name, root / (_SKELETON_TURNS if has_turns else _SKELETON)
    if target.exists():
        raise UsageError(f"{target} exists", "Use another name.")
    package = target / (f"{name}_env" if has_turns else f"nightshift_{name}")
    package.mkdir(parents=True)
    elsewhere = {"pyproject.toml": target / "pyproject.toml", "test.py": target / f"test_{name}.py"}
    for path in sorted(skeleton.iterdir()):
        elsewhere.get(path.name, package / path.name).write_text(path.read_text().replace("NAME", name))
    (package / "py.typed").touch()
    files = ": data.py makes the questions, scoring.py the scores, and prime-rl uses taskset.py"
    files = f"/{name}_env: the taskset contains the tasks, the Env plays the episodes" if has_turns else files
    engine = " --engine prime-rl" if has_turns else ""
    table = [f"[environment.{name}]", f'package = "environments/{name}"', "num_validation = 200", "max_turns = 2"]
    return [
        f"wrote environments/{name}{files}",
        f'choose the environment in {RULES_NAME}: environments = ["{name}"]{", and below" if has_turns else ""}',
        *(table if has_turns else ()),
        f"check the environment: uv run nightshift doctor --environment {name}",
        f"commit the folder, then start a campaign: uv run run.py{engine} --branch {name}",
    ]


def look(root: Path, name: str, clock: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """Yield lines about splits, an example, and the scores and times of rewards. NightshiftError for an error in it."""
    (rules,) = environments_named(root, [name])
    (environment,) = load(root, [rules])
    scorer, began = environment.scorer, clock()
    try:
        examples = environment.examples("train")
        seconds, num = clock() - began, rules.num_validation
        sizes = f"{len(examples)} training examples, {num} for validation, {num} for test"
        yield f"{rules.name}: {sizes}; loaded in {seconds:.1f} s"
        if rules.taskset is not None:
            yield f"code: {rules.taskset.place(root)}, with {', '.join(rules.versions)}"
        if scorer:
            yield from (f"note: {note}" for note in scorer.notes)
        if rules.taskset is not None and rules.taskset.max_turns > 1:
            yield from _play(environment, examples[:_NUM_EPISODES])
            return
        examples = examples[:NUM_EXAMPLES]
        chat = environment.episode(examples[0]).ask() or ()
        yield from (f"{message['role']}: {clean(message['content'], 300)}" for message in chat)
        texts_of = {"an empty text": [""] * len(examples), "its answer": [example.answer for example in examples]}
        if rules.is_game:  # the answer of an opening is its value, not a move
            del texts_of["its answer"]
        for label, texts in texts_of.items():
            began = clock()
            scores = [_score(environment, example, text) for example, text in zip(examples, texts, strict=True)]
            milliseconds = 1000 * (clock() - began) / len(scores)
            shown = f" ({clean(texts[0], 60)!r})" if texts[0] else " (the task has none)" * (label == "its answer")
            yield f"{label}{shown}: score {fmean(scores):.3f} over {len(scores)} tasks, {milliseconds:.1f} ms each"
        if scorer and (failures := scorer.failures()):
            raise UsageError(f"{name}: {failures}", _FIX)
    finally:
        if scorer:
            scorer.close()


class _ScriptedPolicy(BaseHTTPRequestHandler):
    """An OpenAI-compatible server whose answers are scripted: it calls the first tool once, if there are tools."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        """Answer a chat."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message: dict[str, object] = {"role": "assistant", "content": "a scripted answer"}
        if request.get("tools") and not any(turn["role"] == "tool" for turn in request["messages"]):
            tool = request["tools"][0]["function"]
            fields = tool["parameters"].get("properties", {})
            arguments = {name: _ARGUMENTS.get(field.get("type"), "a") for name, field in fields.items()}
            call = {"name": tool["name"], "arguments": json.dumps(arguments)}
            message |= {"tool_calls": [{"id": "call", "type": "function", "function": call}]}
        usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        answer = {"id": "a", "object": "chat.completion", "created": 0, "model": request["model"], "usage": usage}
        data = json.dumps(answer | {"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _play(environment: Environment, examples: Sequence[Example]) -> Iterator[str]:
    """Yield lines about episodes of a scripted policy."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _ScriptedPolicy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        policy = {"base_url": url, "model": "scripted", "temperature": 0.0, "max_tokens": 64}
        assert environment.scorer is not None
        played = environment.scorer.play([example.key for example in examples], policy, lambda num_done: None)
        server.shutdown()
    causes = [cause for episode in played.values() if (cause := episode.failed or episode.refused)]
    for number, episode in enumerate(played.values(), 1):
        calls = f"{episode.tool_calls} tool calls ({episode.tool_errors} failed)"
        score = f"score {episode.score:.3f}" if episode.score is not None else "no score"
        yield f"episode {number} of a scripted policy: {episode.turns} turns, {calls}, {score}"
        yield from (clean(line, 300) for line in episode.text.splitlines() if line.strip())
    if causes:
        raise UsageError(f"{environment.name}: {len(causes)} of {len(played)} episodes failed: {causes[0]}", _FIX)


def _score(environment: Environment, example: Example, text: str) -> float:
    """Return the score of an example if `text` is the answer to every question."""
    episodes = environment.episodes(example)
    for episode in episodes:
        while episode.ask() is not None:
            episode.answer(text)
    return fmean(episode.score() for episode in episodes)

"""The client of a run's vLLM server: its health, its weights, and the completions of the final policy.

The endpoints are those of vLLM, and of prime_rl/inference/vllm/server.py at the pinned commit.
"""

import asyncio
import ssl
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import msgspec

from nightshift.campaign.records import Completion
from nightshift.config.rules import Decoding
from nightshift.errors import EngineError
from nightshift.evaluation.environment import Message
from nightshift.files import parse_json
from nightshift.text import clean

CONCURRENCY = 512  # below the usual limit of 1,024 open files per process; vLLM decodes 256 to 1,024 sequences at once
LOG_NAME = "inference.log"
HEALTH_SECONDS = 2.0
ADMIN_SECONDS = 60.0  # measured: 0.03 s per request with a tiny model
RETRIES = 3  # of a request whose connection broke
BACKOFF_SECONDS = 0.25  # doubles with each attempt
_TICK_SECONDS = 1.0
_CHAT = "/v1/chat/completions"


# The fields of an answer that are read: one completion that ended by itself or at the token limit.
class _Message(msgspec.Struct):
    content: str | None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: Literal["stop", "length"]


class _Usage(msgspec.Struct):
    completion_tokens: Annotated[int, msgspec.Meta(ge=0)]


class _Answer(msgspec.Struct):
    model: str
    choices: tuple[_Choice]
    usage: _Usage


# The answer to `prompt_logprobs` and `return_token_ids`: for each token a table of this token and the most likely one.
class _Prompt(msgspec.Struct):
    model: str
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, dict[str, Any]] | None]


class Server:
    """The server of one run. Every call ends by `deadline`, on `clock`."""

    def __init__(self, port: int, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline, self._clock = deadline, clock
        # Shared by all clients, because a client without a context loads the system's certificates.
        no_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.base_url = f"http://127.0.0.1:{port}"
        self._options: dict[str, Any] = {"base_url": self.base_url, "trust_env": False, "verify": no_tls}
        self._client = httpx.Client(**self._options)

    def close(self) -> None:
        """Close the connections; the server continues."""
        self._client.close()

    def raise_if_late(self, num_done: int) -> None:
        """Raise EngineError after the deadline of the run. `num_done`: finished completions or episodes."""
        if self._clock() >= self._deadline:
            raise EngineError(f"the evaluation reached the deadline of the run: {num_done} answers were finished")

    def is_healthy(self) -> bool:
        """Return whether the server answers, as it also does while it is paused."""
        try:
            return self._client.get("/health", timeout=HEALTH_SECONDS).status_code == 200
        except httpx.HTTPError:
            return False

    def load_weights(self, folder: Path, model: str) -> None:
        """Load final weights from `folder` (absolute) and serve them as `model`. EngineError if that fails."""
        self.post("/resume")  # the orchestrator may have been killed while the server was paused
        if (folder / "adapter_config.json").exists():
            self.post("/load_lora_adapter", lora_name=model, lora_path=str(folder))
        else:
            self.post("/pause")
            self.post("/update_weights", weight_dir=str(folder))
            self.post("/resume")

    def prompt_logprobs(
        self, chat: Sequence[Message], model: str, engine: int | None = None
    ) -> tuple[list[int], list[float]]:
        """Return the tokens of a chat, and the log-probability of each token but the first. EngineError.

        `engine`: the data-parallel engine that answers; None: any.
        """
        options = {"max_completion_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1, "return_token_ids": True}
        salt = uuid.uuid4().hex
        response = self.post(_CHAT, engine, messages=chat, model=model, cache_salt=salt, **options)
        try:
            answer = parse_json(response.content, _Prompt)
            _require_model(answer.model, model)
            pairs = [*zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True)][1:]
            return answer.prompt_token_ids, [(table or {})[token]["logprob"] for token, table in pairs]
        except (ValueError, KeyError) as error:
            raise EngineError(f"no log-probabilities in the server's answer: {clean(str(error), 200)}") from None

    def post(self, path: str, engine: int | None = None, **body: Any) -> httpx.Response:
        """Send a request. EngineError unless the server answers with status 200 in time."""
        seconds = min(ADMIN_SECONDS, self._deadline - self._clock())
        if seconds <= 0:
            raise EngineError(f"no time is left for {path}")
        try:
            headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
            response = self._client.post(path, json=body or None, headers=headers, timeout=seconds)
        except httpx.HTTPError as error:
            cause = f"the server did not answer {path} within {seconds:.0f} s: {type(error).__name__} {error}"
            raise EngineError(cause, log=LOG_NAME) from None
        if response.status_code != 200:
            cause = f"the server answered {path} with {response.status_code}: {clean(response.text[:4096], 200)}"
            raise EngineError(cause, log=LOG_NAME)
        return response

    def complete(
        self, prompts: Sequence[Sequence[Message]], decoding: Decoding, model: str, progress: Callable[[int], None]
    ) -> list[Completion]:
        """Return one completion of `model` per prompt, in order.

        EngineError if an answer is not one finished completion of the model.

        `progress`: called every second in this thread with the number of completions; its exceptions end the call.
        """
        # vLLM would read missing parameters from the model's generation_config.json.
        sampling = {
            "model": model,
            "cache_salt": uuid.uuid4().hex,  # a prefix cache keeps keys and values of earlier weights
            "max_completion_tokens": decoding.max_completion_tokens,
            "temperature": decoding.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "seed": 0,
            "stream": False,
        }
        bodies = [{**sampling, "messages": [dict(message) for message in prompt]} for prompt in prompts]
        answers: dict[int, Completion] = {}
        # The event loop runs in another thread: signal handlers raise in this one (Ctrl-C), and the callbacks of a loop
        # would swallow the exception.
        with asyncio.Runner() as runner, ThreadPoolExecutor(1) as pool:
            loop = runner.get_loop()
            task = loop.create_task(self._ask_all(bodies, answers))
            future = pool.submit(loop.run_until_complete, task)
            try:
                while not wait([future], timeout=_TICK_SECONDS).done:
                    progress(len(answers))
            finally:
                if not future.done():
                    loop.call_soon_threadsafe(task.cancel)
            future.result()
        progress(len(answers))
        return [answers[index] for index in range(len(bodies))]

    async def _ask_all(self, bodies: list[dict[str, Any]], answers: dict[int, Completion]) -> None:
        """Send all requests. Each worker has a client with one connection, because in a pool of hundreds of connections
        a request costs 10 ms of CPU instead of 1."""
        waiting = iter(enumerate(bodies))

        async def work() -> None:
            async with httpx.AsyncClient(timeout=None, **self._options) as client:
                for index, body in waiting:
                    try:
                        answers[index] = await _ask(client, body)
                    except ValueError as error:
                        raise EngineError(f"prompt {index}: {error}", log=LOG_NAME) from None

        # After an error, the other workers end when the Runner is closed.
        await asyncio.gather(*(work() for _ in range(min(CONCURRENCY, len(bodies)))))


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Completion:
    """Return a completion. ValueError for another status than 200, an invalid answer, or a broken connection."""
    for attempt in range(1, RETRIES + 2):
        try:
            response = await client.post(_CHAT, json=body)
            break
        except httpx.HTTPError as error:
            if attempt > RETRIES:
                raise ValueError(f"the connection broke {attempt} times: {type(error).__name__} {error}") from None
            await asyncio.sleep(BACKOFF_SECONDS * 2**attempt)
    if response.status_code != 200:
        raise ValueError(f"status {response.status_code}: {clean(response.text[:4096], 200)}")
    try:
        answer = parse_json(response.content, _Answer)
    except ValueError as error:
        raise ValueError(f"{error}: no completion in {clean(response.text[:4096], 200)}") from None
    _require_model(answer.model, body["model"])
    (choice,) = answer.choices
    text, num_tokens = choice.message.content or "", answer.usage.completion_tokens
    return Completion(text=text, num_tokens=num_tokens, truncated=choice.finish_reason == "length")


def _require_model(name: str, expected: str) -> None:
    if name != expected:
        raise ValueError(f"answered by model {clean(name, 200)} instead of {expected}")

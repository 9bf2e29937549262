"""The client of a run's vLLM server: its health, its weights, and the completions of the final policy.

Endpoints: prime_rl/inference/vllm/server.py at the pinned commit, and vLLM's own. The server listens on
loopback without a password, so nothing here sends a secret or goes through a proxy.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx

from nightshift.engines import Message
from nightshift.errors import EngineError
from nightshift.records import Completion, Decoding

# vLLM decodes 256 sequences at a time, and 1,024 on cards of 70 GiB and more but the A100 (get_batch_defaults in
# its engine/arg_utils.py): 512 keep the first full with as many waiting, and stay below the usual limit of 1,024
# open files a process.
CONCURRENCY = 512
HEALTH_SECONDS = 2.0
# Measured: 0.03 s each with a tiny model. prime-rl's own limits are 300 and 720 s; here nothing else is in flight.
ADMIN_SECONDS = 60.0
STALL_SECONDS = 120.0  # without a single completion; estimated: 1,024 tokens at 20 ms each, six times over
CONNECT_SECONDS = 30.0
RETRIES = 3  # of a request whose connection broke
BACKOFF_SECONDS = 0.5  # before the first retry; doubles
MAX_ANSWER_BYTES = 8 << 20  # 2,048 tokens are some 10 kB, at the very worst 2 MB
SEED = 0  # of sampled decoding; greedy has no use for it
_TICK_SECONDS = 1.0
_CHAT = "/v1/chat/completions"


class Server:
    """The server of one run. Every call ends by `deadline`, on `clock`."""

    def __init__(self, port: int, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline, self._clock = deadline, clock
        # The context is one for all clients: of its own, each would load the system's certificates.
        no_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._options: dict[str, Any] = {"base_url": f"http://127.0.0.1:{port}", "trust_env": False, "verify": no_tls}
        self._client = httpx.Client(**self._options)

    def close(self) -> None:
        """Close the connections. The server is none of this object's business."""
        self._client.close()

    def is_healthy(self) -> bool:
        """True if it answers; also while paused."""
        try:
            return self._client.get("/health", timeout=HEALTH_SECONDS).status_code == 200
        except httpx.HTTPError:
            return False

    def model_ids(self) -> list[str]:
        """The names that it serves: the base model, and adapters under their own."""
        response = self._call("GET", "/v1/models")
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, LookupError, TypeError):
            raise EngineError(f"/v1/models gave no list of models: {_printable(response.text)}") from None

    def pause(self) -> None:
        """Hold all requests, also those that come now, until `resume`. Pausing twice is harmless."""
        self._call("POST", "/pause")

    def resume(self) -> None:
        """Go on; harmless when not paused."""
        self._call("POST", "/resume")

    def update_weights(self, folder: Path) -> None:
        """Load the weights of a full fine-tune. An absolute existing folder: another name is asked of a hub."""
        self._call("POST", "/update_weights", {"weight_dir": _existing(folder)})

    def load_lora_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter and serve it as model `name`, in place of an earlier one of that name."""
        self._call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": _existing(folder)})

    def load_weights(self, folder: Path, model: str, *, is_adapter: bool = False) -> None:
        """Load final weights and have them complete a word. `model`: the name that they are served under.

        The orchestrator may have been killed between its own pause and resume, hence the resume first.
        After an update that failed, the server goes on with its old weights: EngineError, nothing to evaluate.
        """
        self.resume()
        if is_adapter:
            self.load_lora_adapter(model, folder)
        else:
            self.pause()
            self.update_weights(folder)
            self.resume()
        probe = [{"role": "user", "content": "1 + 1 ="}]
        salt = f"probe-{uuid.uuid4().hex}"
        self.complete([probe], Decoding(max_completion_tokens=1), model, salt, lambda num_done: None, ADMIN_SECONDS)

    def complete(
        self,
        prompts: Sequence[Sequence[Message]],
        decoding: Decoding,
        model: str,
        cache_salt: str,
        progress: Callable[[int], None],
        stall_seconds: float = STALL_SECONDS,
    ) -> list[Completion]:
        """One completion a prompt, in order, from the model served as `model`.

        `cache_salt` must be new for every set of weights: the server keeps the prefix cache of earlier ones.
        `progress` is called every second, in this thread, with the number done; what it raises ends the call.
        Raises EngineError for an answer that is not exactly one finished completion of that model, and when none
        comes for `stall_seconds`.
        """
        # All that vLLM would else take from the model's generation_config.json, said explicitly.
        sampling = {
            "model": model,
            "cache_salt": cache_salt,
            "max_completion_tokens": decoding.max_completion_tokens,
            "temperature": decoding.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": 1,
            "seed": SEED,
            "stream": False,
        }
        bodies = [{**sampling, "messages": [dict(message) for message in prompt]} for prompt in prompts]
        answers: list[Completion | None] = [None] * len(bodies)
        num_done, last_change = 0, self._clock()

        def tick() -> None:
            nonlocal num_done, last_change
            done, now = sum(answer is not None for answer in answers), self._clock()
            if done > num_done:
                num_done, last_change = done, now
            answered = f"the server answered {done} of {len(bodies)} prompts"
            if now >= self._deadline:
                raise EngineError(f"{answered} before the deadline of the run")
            if now >= last_change + stall_seconds:
                raise EngineError(f"{answered} and none for {stall_seconds:g} s")
            progress(done)

        _run_beside(self._ask_all(bodies, answers), tick)
        completions = [answer for answer in answers if answer is not None]
        if len(completions) != len(bodies):
            raise EngineError(f"the server answered {len(completions)} of {len(bodies)} prompts")
        progress(len(completions))
        return completions

    async def _ask_all(self, bodies: list[dict[str, Any]], answers: list[Completion | None]) -> None:
        """Workers that share the list of prompts. Each has a client of one connection: in a pool of hundreds a
        request costs 10 ms of CPU instead of 1 (httpcore looks at all of them each time)."""
        waiting = iter(enumerate(bodies))
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)

        async def work() -> None:
            async with httpx.AsyncClient(timeout=timeout, **self._options) as client:
                for index, body in waiting:
                    try:
                        answers[index] = _completion(await _ask(client, body), body["model"])
                    except ValueError as error:
                        raise EngineError(f"prompt {index}: {error}") from None

        workers = [asyncio.create_task(work()) for _ in range(min(CONCURRENCY, len(bodies)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    def _call(self, method: str, path: str, body: dict[str, str] | None = None) -> httpx.Response:
        """An admin request; anything but 200 in time is an EngineError."""
        seconds = min(ADMIN_SECONDS, self._deadline - self._clock())
        if seconds <= 0:
            raise EngineError(f"the deadline of the run passed before {path}")
        try:
            response = self._client.request(method, path, json=body, timeout=seconds)
        except httpx.TimeoutException:
            raise EngineError(f"the server did not answer {path} within {seconds:.0f} s") from None
        except httpx.HTTPError as error:
            raise EngineError(f"the server cannot be asked for {path}: {type(error).__name__} {error}") from None
        if response.status_code != 200:
            raise EngineError(f"the server answered {path} with {response.status_code}: {_printable(response.text)}")
        return response


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> bytes:
    """The answer's bytes. ValueError for another status than 200 and for a connection that keeps breaking."""
    for attempt in range(RETRIES + 1):
        try:
            async with client.stream("POST", _CHAT, json=body) as response:
                answer = bytearray()
                async for chunk in response.aiter_bytes():
                    answer += chunk
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise ValueError(f"the answer is longer than {MAX_ANSWER_BYTES >> 20} MB")
                if response.status_code != 200:
                    raise ValueError(
                        f"status {response.status_code}: {_printable(bytes(answer[:4096]).decode(errors='replace'))}"
                    )
                return bytes(answer)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            if attempt == RETRIES:
                raise ValueError(f"the connection broke {attempt + 1} times: {type(error).__name__} {error}") from None
            await asyncio.sleep(BACKOFF_SECONDS * 2**attempt)
        except httpx.HTTPError as error:
            raise ValueError(f"{type(error).__name__} {error}") from None
    raise AssertionError("unreachable")


def _completion(answer: bytes, model: str) -> Completion:
    """ValueError unless the answer is one completion of `model` that ended by itself or at the token limit."""
    try:
        data = json.loads(answer)
        (choice,) = data["choices"]
        served, text, reason = data["model"], choice["message"]["content"] or "", choice["finish_reason"]
        num_tokens = data["usage"]["completion_tokens"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"no completion in {_printable(answer[:4096].decode(errors='replace'))}") from None
    if served != model:
        raise ValueError(f"answered by model {_printable(repr(served))} instead of {model}")
    if reason not in ("stop", "length"):
        raise ValueError(f"finish reason {_printable(repr(reason))}")
    if not isinstance(text, str) or type(num_tokens) is not int or num_tokens < 0:
        raise ValueError(f"no text with its number of tokens in {_printable(answer[:4096].decode(errors='replace'))}")
    return Completion(text=text, num_tokens=num_tokens, truncated=reason == "length")


def _run_beside(work: Coroutine[Any, Any, None], tick: Callable[[], None]) -> None:
    """Run `work` in a thread of its own and call `tick` every second in this one, until it ends or tick raises.

    In this thread signal handlers raise (Ctrl-C): inside an event loop's callback that would be swallowed.
    """
    with asyncio.Runner() as runner, ThreadPoolExecutor(1) as pool:
        loop = runner.get_loop()
        task = loop.create_task(work)
        future = pool.submit(loop.run_until_complete, task)
        try:
            while not wait([future], timeout=_TICK_SECONDS).done:
                tick()
        finally:
            if not future.done():
                loop.call_soon_threadsafe(task.cancel)
        future.result()


def _existing(folder: Path) -> str:
    if not (folder.is_absolute() and folder.is_dir()):
        raise EngineError(f"{folder} is no absolute path of an existing folder")
    return str(folder)


def _printable(text: str) -> str:
    """The first 200 printable characters, on one line."""
    return "".join(c for c in " ".join(text[:4096].split()) if c.isprintable())[:200]

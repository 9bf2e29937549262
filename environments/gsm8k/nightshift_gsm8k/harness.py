"""A verifiers harness that asks once, from inside the worker: no subprocess, one HTTP request a rollout.

The stock chat harness starts a Python program for every rollout, which costs seconds of CPU each.
"""

from __future__ import annotations

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult, Runtime


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """One chat completion through the interception server, which adds model, sampling and the trace."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: vf.HarnessConfig) -> None:
        super().__init__(config)
        # Shared by all rollouts. A harness is never closed, so no connection stays open after its request. A proxy
        # of the environment must not see loopback traffic. How long an answer may take is the rollout's limit.
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        """Ask once; an HTTP error is a failed program, whose cause the rollout already knows."""
        system, prompt = self.resolve_prompt(data)
        messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        if system is not None:
            messages.insert(0, vf.SystemMessage(content=system))
        response = await self._client.post(
            f"{endpoint}/chat/completions",
            headers={"Authorization": f"Bearer {secret}"},
            json={"model": ctx.model, "messages": [message_to_wire(message) for message in messages]},
        )
        if response.is_error:
            return ProgramResult(1, "", f"HTTP {response.status_code}: {response.text}")
        return ProgramResult(0, "", "")

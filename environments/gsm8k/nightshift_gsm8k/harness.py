"""A verifiers harness that chats inside the worker. The stock harness starts a Python program for every rollout."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult, Runtime

CONNECT_SECONDS = 60.0  # to a server on this machine, which may be busy
TOOL_SECONDS = 30.0  # limit of one call of a tool
TOOL_FAILED = "error: "  # prefix of the answer of a tool that failed


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Chat through the interception server until the model calls no tool. The server adds sampling and trace."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    waiting = answered = 0  # requests of all rollouts of this process to the policy

    def __init__(self, config: vf.HarnessConfig) -> None:
        super().__init__(config)
        # All rollouts share the client. Nobody closes a harness, so no connection stays open after its request. A proxy
        # must not see loopback traffic. The rollout's own timeout limits an answer.
        self._client = httpx.AsyncClient(
            trust_env=False,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
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
        """Chat to the end of the model's turn. An HTTP error is reported as a failed program."""
        system, prompt = self.resolve_prompt(data)
        wire = [] if system is None else [{"role": "system", "content": system}]
        messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or ()
        wire += map(message_to_wire, messages)
        tools: list[dict[str, Any]] = []
        places: dict[str, tuple[str, str]] = {}  # by tool, the URL of the server and the tool's name on that server
        for server, url in mcp_urls.items():
            async with _tool_session(url) as session:
                for tool in (await session.list_tools()).tools:
                    name = f"{server}_{tool.name}" if server else tool.name
                    places[name] = url, tool.name
                    function = {"name": name, "description": tool.description or "", "parameters": tool.inputSchema}
                    tools.append({"type": "function", "function": function})
        while True:
            ChatHarness.waiting += 1
            try:
                response = await self._client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": wire, **({"tools": tools} if tools else {})},
                )
            finally:
                ChatHarness.waiting -= 1
            ChatHarness.answered += 1
            if response.is_error:
                return ProgramResult(1, "", f"HTTP {response.status_code}: {response.text}")
            message = response.json()["choices"][0]["message"] if tools else {}
            if not message.get("tool_calls"):
                return ProgramResult(0, "", "")
            wire.append({name: value for name, value in message.items() if value is not None})
            for call in message["tool_calls"]:
                content = await _call_tool(places, call["function"])
                wire.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def _call_tool(places: Mapping[str, tuple[str, str]], function: Mapping[str, str]) -> str:
    """Return the answer of a tool, or the error of a tool that fails or exceeds its time limit."""
    try:
        url, name = places[function["name"]]
        async with asyncio.timeout(TOOL_SECONDS), _tool_session(url) as session:
            result = await session.call_tool(name, json.loads(function["arguments"] or "{}"))
    except Exception as error:
        return f"{TOOL_FAILED}{type(error).__name__}: {error}"
    text = "\n".join(getattr(block, "text", str(block)) for block in result.content)
    return f"{TOOL_FAILED}{text}" if result.isError else text


@asynccontextmanager
async def _tool_session(url: str) -> AsyncIterator[Any]:
    from mcp import ClientSession  # takes a second to load
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    client = create_mcp_http_client(timeout=httpx.Timeout(TOOL_SECONDS, connect=5.0))
    transport = streamable_http_client(url, http_client=client)
    async with client, transport as (read, write, *_), ClientSession(read, write) as session:
        await session.initialize()
        yield session

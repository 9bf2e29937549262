"""A stand-in for the policy's server: no model, one fixed reply to every chat completion, at once.

    python benchmarks/stand_in_model.py '#### 42'

Prints the port it listens on (loopback) and serves until it is ended. It does as little as possible, so
that a benchmark of environments measures those.
"""

import asyncio
import json
import re
import sys
from contextlib import closing, suppress

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
COMPLETION = {
    "id": "stand-in", "object": "chat.completion", "created": 0, "model": "stand-in",
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}  # fmt: skip


async def serve(reply: str) -> None:
    """Answer requests on kept-alive connections until the process ends."""
    choice = {"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}
    body = json.dumps(COMPLETION | {"choices": [choice]}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):  # until the client has gone
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = CONTENT_LENGTH.search(head)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(answer)
                await writer.drain()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))

"""`nightshift report --serve`: the page in a browser while runs are in flight.

The page contains validation problems with their answers, and an agent in a sandbox can connect to the loopback
interface. Therefore only the path `/TOKEN/` is answered, and no argument, environment variable or file has the token.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from nightshift.errors import Interrupted, NightshiftError, UsageError
from nightshift.executors.process import interruptible
from nightshift.report.page import draw_page


def serve(root: Path, branch: str | None, port: int, show: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; each request draws it again. `show` gets the URL. UsageError if the port cannot be
    used, or `branch` has no experiments."""
    token = secrets.token_urlsafe(32)

    class Handler(BaseHTTPRequestHandler):
        timeout = 60.0  # seconds to receive a request, and to send a page of up to 5 MB

        def do_GET(self) -> None:
            with suppress(ConnectionError):  # a connection that the browser closed is no error
                if not secrets.compare_digest(self.path.encode(), f"/{token}/".encode()):
                    return self.send_error(404)
                try:
                    page = draw_page(root, branch).encode()
                except NightshiftError as error:
                    return self.send_error(503, explain=str(error))
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(page)

        def log_message(self, *args: Any) -> None: ...

    draw_page(root, branch)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        cause = f"cannot listen on port {port}: {error.strerror or error}"
        raise UsageError(cause, "Give another --port (0: any free port).") from None
    with suppress(Interrupted), interruptible(), server:
        show(f"http://127.0.0.1:{server.server_address[1]}/{token}/")
        server.serve_forever()

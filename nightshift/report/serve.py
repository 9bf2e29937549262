"""`nightshift report --serve`: the morning page while a night runs, over HTTP, by the standard library's own server.

It answers two paths, `/` and `/version`, and knows no other: no file is served by its name. On the loopback the Host
header has to name the loopback, so that no foreign name that resolves to it (DNS rebinding) reads the page through a
person's browser. Bound elsewhere, it wants a token that is printed once.
"""

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from nightshift.campaign.git import Repo
from nightshift.campaign.ledger import RECORD_NAME, Ledger
from nightshift.errors import Interrupted, NightshiftError, UsageError
from nightshift.executors.process import interruptible
from nightshift.report.page import render, view_of

_MIN_SECONDS = 1.0  # between two looks at the ledger, and so between two pages
_IDLE_SECONDS = 10.0  # of a connection that asks nothing
_PIECE_BYTES = 32 * 1024  # of an answer: it has _IDLE_SECONDS to be sent, and a whole page has 5 MB
_MAX_CONNECTIONS = 32
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page itself says the rest
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass
class Live:
    """The page of one checkout: written anew when the ledger changed, and at most once in _MIN_SECONDS.

    For many threads at once. `now` says the time on the page, `monotonic` counts seconds.
    """

    root: Path
    branch: str | None
    now: Callable[[], datetime]
    monotonic: Callable[[], float] = time.monotonic
    num_rendered: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _looked: float = float("-inf")
    _version: str = ""
    _rendered: tuple[str, bytes] = ("", b"")

    def version(self) -> str:
        """A hash that is another one when records or certificates are."""
        with self._lock:
            return self._look()

    def page(self) -> bytes:
        """The page as HTML. Raises NightshiftError where there is none to show."""
        with self._lock:
            version = self._look()
            if self._rendered[0] != version:
                view = view_of(Ledger(self.root), Repo(self.root).head().branch, self.now(), self.branch)
                self._rendered = (version, render(view, version).encode())
                self.num_rendered += 1
            return self._rendered[1]

    def _look(self) -> str:
        if self.monotonic() - self._looked >= _MIN_SECONDS:
            self._version, self._looked = _state(Ledger(self.root)), self.monotonic()
        return self._version


def _state(ledger: Ledger) -> str:
    """Of every file that a record or a certificate is in: its size and when it was written."""
    records = (f"{ledger.runs_dir}/{number:04d}/{RECORD_NAME}" for number in ledger.numbers())
    digest = hashlib.sha256()
    for path in (*records, os.fspath(ledger.journal.path)):  # a certificate adds a line, too
        with suppress(OSError):
            status = os.stat(path)  # noqa: PTH116  a Path for each of thousands takes as long as the asking
            digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves one live page until it is closed; `close` leaves no thread. (http.server's own asks DNS for its name.)"""

    allow_reuse_address = True
    daemon_threads = False  # they are waited for: see `close`

    def __init__(self, live: Live, host: str, port: int) -> None:
        """Bind. Raises UsageError for an address that cannot be had."""
        self.live = live
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, address = found[0][0], found[0][4]
            self.is_loopback = ipaddress.ip_address(address[0]).is_loopback
            self.token = "" if self.is_loopback else secrets.token_urlsafe(32)
            self._open, self._guard = set[socket.socket](), threading.Lock()
            super().__init__((str(address[0]), port), Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            cause = f"cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}"
            raise UsageError(cause, "Give another --port (0: any that is free) or --host.") from None

    @property
    def address(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/" + (f"?token={self.token}" if self.token else "")

    def close(self) -> None:
        """End all connections, wait for their threads, and give the port back."""
        with self._guard:
            for connection in self._open:
                with suppress(OSError):  # the other side was faster
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, unless there are too many."""
        with self._guard:
            is_welcome = len(self._open) < _MAX_CONNECTIONS
            if is_welcome:
                self._open.add(request)
        if is_welcome:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no bug; anything else is, with its traceback."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = _IDLE_SECONDS
    server_version, sys_version = "nightshift", ""

    def do_GET(self) -> None:
        """The page or its version; 403 without the right Host or token, 404 for any other path."""
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        if not self._is_allowed(asked.query):
            self.send_error(HTTPStatus.FORBIDDEN)
        elif asked.path == "/version":
            self._answer(self.server.live.version().encode(), "text/plain")
        elif asked.path == "/":
            try:
                self._answer(self.server.live.page(), "text/html")
            except NightshiftError as error:
                self._answer(str(error).encode(errors="replace"), "text/plain", HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _is_allowed(self, query: str) -> bool:
        if self.server.is_loopback:
            return _names_loopback(self.headers.get("Host", ""))
        given = parse_qs(query).get("token", [""])[0]
        return hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode())

    def _answer(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for start in range(0, len(body), _PIECE_BYTES):
            self.wfile.write(body[start : start + _PIECE_BYTES])

    def end_headers(self) -> None:
        """With those that every answer has, errors too."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: only cli/output.py prints."""


def _names_loopback(host: str) -> bool:
    """Whether a Host header, with any port (an ssh tunnel has its own), means this machine itself."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def serve(
    root: Path, output: Path | None, branch: str | None, host: str, port: int, say: Callable[[str], None]
) -> None:
    """Show the page of a checkout until Ctrl-C; `say` gets its address. UsageError where that cannot be had."""
    if output is not None:
        raise UsageError("--serve writes no file", "Leave --output out.")
    with suppress(Interrupted), interruptible():
        server = Server(Live(root, branch, lambda: datetime.now(UTC)), host, port)
        try:
            say(server.address)
            server.serve_forever(poll_interval=0.2)
        finally:
            server.close()

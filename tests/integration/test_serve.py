"""`nightshift report --serve` over real sockets and as a real process: what it answers, whom, and how it ends."""

import html
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nightshift.campaign.ledger import Ledger
from nightshift.report import serve
from nightshift.report.serve import Live, Server
from tests.browsing import NOW, serving
from tests.conftest import git
from tests.night_checkout import nightshift
from tests.stand_in_campaign import BRANCH, build
from tests.waiting import HANG_SECONDS, Clock


@pytest.fixture
def root(tmp_path: Path) -> Path:
    build(tmp_path, 4, num_examples=60, with_files=False)
    return tmp_path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(root: Path, clock: Clock) -> Iterator[Server]:
    with serving(Live(root, BRANCH, lambda: NOW, clock)) as server:
        yield server


@pytest.fixture
def open_server(root: Path, clock: Clock) -> Iterator[Server]:
    """One that is bound to every address of the machine."""
    with serving(Live(root, BRANCH, lambda: NOW, clock), "0.0.0.0") as server:
        yield server


def ask(server: Server, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=HANG_SECONDS)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_two_paths_are_answered_and_no_other(server: Server) -> None:
    status, page, headers = ask(server, "/")
    assert status == 200
    assert "0004" in page
    assert "connect-src 'self'" in html.unescape(page)
    version = re.search(r'name="nightshift-version" content="([0-9a-f]{64})"', page)
    assert version
    assert ask(server, "/version")[1] == version[1]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    for path in (
        "/runs/0001/record.json", "/../train.toml", "/%2e%2e/train.toml", "//etc/passwd", "/version/", "/etc/passwd",
        "/report.html", "/\\..\\x", "*", "/?/../..", "/version?x/../../etc/passwd",
    ):  # fmt: skip
        status, text, headers = ask(server, path)
        assert status in ({200} if path.startswith(("/?", "/version?")) else {400, 404}), path
        assert "root:" not in text
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert ask(server, "/", method="POST")[0] == 501
    for line in (b"GET http://[/ HTTP/1.0", b"GET //[ HTTP/1.0", b"\xff\xfe", b"GET " + b"/" * 70_000):
        with socket.create_connection(("127.0.0.1", int(server.server_address[1])), timeout=HANG_SECONDS) as raw:
            raw.sendall(line + b"\r\n\r\n")
            with raw.makefile("rb") as answer:
                assert re.search(rb"\b4(00|03|04|14)\b", answer.read()), line[:20]


def test_a_foreign_name_that_resolves_to_the_loopback_reads_nothing(server: Server) -> None:
    port = server.server_address[1]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::"):
        for path in ("/", "/version"):
            status, text, _ = ask(server, path, host)
            assert status == 403, host
            assert "0004" not in text
    for host in (f"127.0.0.1:{port}", "localhost:9000", f"[::1]:{port}"):
        assert ask(server, "/version", host)[0] == 200


def test_elsewhere_than_on_the_loopback_a_token_is_needed(open_server: Server) -> None:
    assert len(open_server.token) >= 32
    assert open_server.address.endswith(f"/?token={open_server.token}")
    for query in ("", "?token=", "?token=x", f"?token={open_server.token[:-1]}", "?token=%ff%00", "?TOKEN=a"):
        assert ask(open_server, f"/{query}")[0] == 403
        assert ask(open_server, f"/version{query}")[0] == 403
    assert ask(open_server, f"/?token={open_server.token}", "some.name")[0] == 200
    assert ask(open_server, f"/version?token={open_server.token}")[0] == 200


def test_a_page_is_made_at_most_once_a_second_and_only_of_another_ledger(server, root, clock):
    for _ in range(3):
        before = ask(server, "/")[1]
        clock.now += 10
    assert server.live.num_rendered == 1
    os.utime(root / "runs" / "0002" / "record.json", ns=(1, 1))
    after = ask(server, "/version")[1]
    assert after not in before
    assert server.live.num_rendered == 1  # nobody asked for it
    assert after in ask(server, "/")[1]
    assert server.live.num_rendered == 2
    for number in range(5):  # within the second
        os.utime(root / "runs" / "0002" / "record.json", ns=(number + 2, number + 2))
        clock.now += 0.1
        assert ask(server, "/version")[1] == after
        ask(server, "/")
    assert server.live.num_rendered == 2
    clock.now += 1
    assert ask(server, "/version")[1] != after


def test_what_cannot_be_shown_is_one_line(server: Server) -> None:
    server.live.branch = "autoresearch/<b>none"
    status, text, headers = ask(server, "/")
    assert status == 503
    assert text.startswith("no experiment ran on autoresearch/<b>none")
    assert headers["Content-Type"].startswith("text/plain")


def test_connections_that_ask_nothing_hold_up_neither_others_nor_the_end(server: Server) -> None:
    address = ("127.0.0.1", int(server.server_address[1]))
    idle = [socket.create_connection(address) for _ in range(5)]
    assert ask(server, "/version")[0] == 200
    more = [socket.create_connection(address) for _ in range(serve._MAX_CONNECTIONS)]
    more[-1].settimeout(HANG_SECONDS)
    assert more[-1].recv(1) == b""  # turned away at once
    for one in (*idle, *more[1:]):
        one.close()
    server.shutdown()
    server.close()  # waits for the threads of all connections, and `more[0]` is still open
    assert not server._open
    more[0].close()


@pytest.fixture
def checkout(root: Path) -> Path:
    git(root, "init", "--quiet", "--initial-branch", BRANCH)
    (root / "run.py").write_text("")
    (root / "train.toml").write_bytes(Ledger(root).source(1))
    return root


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_interrupted(checkout: Path, number: signal.Signals) -> None:
    command = [shutil.which("nightshift") or "nightshift", "report", "--serve", "--port", "0"]
    with subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        port = int(address.rstrip("/").rpartition(":")[2])
        idle = socket.create_connection(("127.0.0.1", port))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECONDS)
        connection.request("GET", "/")
        assert b"0004" in connection.getresponse().read()
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=HANG_SECONDS)
        idle.close()
    assert (process.returncode, stdout, stderr) == (0, "", "")
    assert not (checkout / "runs" / "report.html").exists()


def test_wrong_use_is_one_line(checkout: Path, server: Server) -> None:
    port = str(server.server_address[1])
    for name, value in (("--port", port), ("--output", "x"), ("--host", "nowhere.invalid")):
        code, stdout, stderr = nightshift(checkout, "report", "--serve", name, value)
        assert (code, stdout) == (2, "")
        assert len(stderr.splitlines()) == 1
        assert name in stderr or value in stderr

"""`nightshift report --serve` as a real process: who gets the page, how it stays current, and how the command ends."""

import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nightshift.campaign.ledger import Ledger
from tests.campaigns import replace
from tests.checkouts import commit_all
from tests.night_checkout import nightshift
from tests.stand_in_campaign import BRANCH, build
from tests.waiting import HANG_SECONDS

REFRESH = '<meta http-equiv="refresh" content="30">'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    build(root, 2, num_examples=60, with_files=False)
    (root / "run.py").write_text("")
    (root / "rules.toml").touch()
    (root / "train.toml").write_bytes(Ledger(root).source(1))
    (root / ".gitignore").write_text("runs/\n")
    commit_all(root, BRANCH)
    return root


@pytest.fixture
def served(root: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and its URL."""
    command = ["nightshift", "report", "--serve", "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=root, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        yield process, process.stdout.readline().strip()
        process.kill()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HANG_SECONDS) as answer:
        return answer.read().decode()


def test_who_does_not_know_the_token_gets_no_page(root, served, tmp_path):
    """An agent in the sandbox reaches the port, and sees the processes and the checkout."""
    process, url = served
    address, token = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/([\w-]{43})/", url).groups()
    for name in ("", "report.html", "runs/report.html", "runs/0001/record.json", f"{token[::-1]}/"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(f"{address}/{name}")
    server = psutil.Process(process.pid)
    assert not any(token in text for text in (*server.cmdline(), *server.environ().values()))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    assert "run-0001" in fetch(url)


@pytest.mark.slow
def test_the_page_is_current_and_reloads_itself_while_runs_are_in_flight(root, served):
    ledger, (_, url) = Ledger(root), served
    assert REFRESH not in fetch(url)
    with ledger.lock():
        ledger.write(replace(ledger.record(2), description="another idea"))
        page = fetch(url)
        assert REFRESH in page
        assert "another idea" in page
        assert nightshift(root, "report")[0] == 0
        assert REFRESH in (root / "runs" / "report.html").read_text()
    assert REFRESH not in fetch(url)
    assert nightshift(root, "report")[0] == 0
    assert REFRESH not in (root / "runs" / "report.html").read_text()


@pytest.mark.slow
def test_wrong_use_is_one_line_and_ctrl_c_ends_the_server(root, served):
    process, url = served
    port = url.split(":")[2].partition("/")[0]
    for name, value in (("--port", port), ("--branch", "none")):
        code, stdout, stderr = nightshift(root, "report", "--serve", name, value)
        assert (code, stdout, stderr.count("\n")) == (2, "", 1)
        assert name in stderr or value in stderr
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=HANG_SECONDS) == ("", "")
    assert process.returncode == 0
    assert not (root / "runs" / "report.html").exists()

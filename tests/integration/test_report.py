"""The morning page from real files: nothing that a killed process or a hostile text leaves behind breaks it."""

import base64
import hashlib
import json
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from nightshift.campaign.campaign import Campaign
from nightshift.campaign.commits import incumbent_config
from nightshift.campaign.ledger import Ledger
from nightshift.campaign.records import Judgement
from nightshift.cli import output
from nightshift.cli import run as command
from nightshift.cli.main import commands
from nightshift.config.train_toml import parse
from nightshift.report.markdown import summary
from nightshift.report.page import render, view_of
from nightshift.report.slices import weakest
from tests.campaigns import a_record, a_result, certificate_for, replace, stored, with_certificate
from tests.checkouts import commit_all
from tests.conftest import git
from tests.night_checkout import nightshift
from tests.stand_in_campaign import BRANCH, RULES_HASH, build
from tests.waiting import HANG_SECONDS

NOW = datetime(2026, 11, 21, 7, tzinfo=UTC)
HOSTILE = (
    "<script>document.title='pwned'</script>",
    "</script><img src=x onerror=\"document.title='pwned'\">",
    "{{7*7}}{% raw %}${7*7}",
    "javascript:document.title='pwned'",
    "a\x00b\x1b[31m",
    "\u202egnp.exe\u2066",
    "'\"><svg onload=alert(1)>`$(touch pwned)`;|&",
    "| --- | [x](javascript:alert(1)) ![](http://example.invalid/x.png) <b>",
    "x" * 100_000,
)


class Page(HTMLParser):
    """What a browser would act on: elements with their attributes, scripts, data, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.data: dict[str, Any] = {"rows": []}  # of the script
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = "data" if ("id", "data") in attrs else tag
            self.scripts += [""] if self._inside == "script" else []

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag in ("script", "style") else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "data":
            self.data = json.loads(data)
        elif not self._inside:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def details(self, number: int) -> dict[str, str]:
        """What opening the line of an experiment shows, by label."""
        [row] = [row for row in self.data["rows"] if row["number"] == number]
        return dict(row["details"])


def rendered(root: Path) -> Page:
    view = view_of(Ledger(root), NOW)
    text = summary(view)
    assert "Traceback" not in text
    text.encode()
    return require_safe(render(view))


def require_safe(html: str) -> Page:
    """Our two scripts only, named by the policy; data is JSON; nothing is loaded; no handler; links stay on it."""
    page = Page(html)
    html.encode()
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes) or "'none'"
    assert f"; script-src {allowed}; " in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    scripts = [attributes for tag, attributes in page.elements if tag == "script"]
    expected = [{"type": "application/json", "id": "data"}, {}, {}] if page.scripts else []
    assert scripts == expected
    for tag, attributes in page.elements:
        assert tag not in ("img", "iframe", "object", "embed", "form", "base", "audio", "video"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "src", "action", "xlink:href"):
                assert value == "data:," or re.fullmatch(r"#run-\d{4,}", value or ""), (tag, value)
    assert "\x00" not in html
    assert "\u202e" not in html
    assert not re.search(r"measured again|believed|\brider|adopt|last runs", page.text)
    return page


@pytest.mark.parametrize("count", [0, 12])
def test_few_experiments(tmp_path: Path, count: int) -> None:
    build(tmp_path, count, num_examples=60)
    page = rendered(tmp_path)
    assert [row["number"] for row in page.data["rows"]] == [*range(1, count + 1)]
    # Without its script the page has a picture.
    assert ("<svg" in page.html.partition("<script")[0]) == (count > 0)


def test_only_crashes(tmp_path: Path) -> None:
    crash = a_record(judgement=Judgement(why="loss became nan at step 3"), notes=("looked at the curves",))
    stored(tmp_path, [replace(crash, status="crash")] * 3).reserve(a_record(), b"")
    page = rendered(tmp_path)
    assert page.details(1)["notes"] == "looked at the curves"
    assert page.details(1)["why"] == "loss became nan at step 3"
    assert [row["verdict"] for row in page.data["rows"]] == ["crash"] * 3 + ["undecided"]
    assert page.data["specs"]["progress"] is None


def test_hostile_texts_are_shown_and_do_nothing(tmp_path: Path) -> None:
    ledger = build(tmp_path, 4, num_examples=60)
    everything = " ".join(HOSTILE)
    for record in ledger.records():
        ledger.write(
            replace(
                record,
                branch="autoresearch/<b>\u202eevil",
                description=everything,
                notes=(everything,),
                versions={everything: everything},
                unused_keys=(everything,),
                **dict.fromkeys(("prediction", "lesson", "health", "git_action", "hardware"), everything),
                diff=(everything, f"{HOSTILE[1]} 1 -> 2", f"a.b {everything} -> {everything}"),
                judgement=replace(record.judgement, why=everything) if record.judgement else None,
            )
        )
    page = rendered(tmp_path)
    shown = " ".join((page.text, *page.details(2).values()))
    for text in ("{{7*7}}", "[U+0000]", "[U+202E]", "more characters"):
        assert text in shown, text
    assert "x" * 5000 not in page.html


def test_a_certified_campaign_says_what_to_copy_and_what_next(tmp_path: Path) -> None:
    """In git, on a branch of its own, with the commits that the records name."""
    ledger = build(tmp_path, 30, num_examples=60, with_files=False)
    campaign = Campaign.of(ledger.records(), BRANCH, RULES_HASH)
    baseline = ledger.source(1)
    incumbent = incumbent_config(parse(baseline), campaign.kept).source
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commits = []
    for source in (baseline, incumbent):
        (tmp_path / "train.toml").write_bytes(source)
        git(tmp_path, "add", "train.toml")
        git(tmp_path, "commit", "--quiet", "-m", "train.toml")
        commits.append(git(tmp_path, "rev-parse", "HEAD").strip())
        if source == baseline:
            git(tmp_path, "switch", "--quiet", "--create", BRANCH)
    for record in ledger.records():
        ledger.write(replace(record, commit=commits[0]))
    view = view_of(ledger, NOW)
    weak = [change.name for change, effect in view.morning.story.campaign.effects if effect.p_helps < 0.6]
    assert weak
    steps, reverts = view.sections["copy"].steps, [f"uv run nightshift revert {name}" for name in weak]
    shown = [command for _, command in steps]
    merge = f"git switch main && git merge --no-edit {BRANCH}"
    assert shown == [f"git diff {commits[0][:10]} {BRANCH} -- train.toml", merge]
    assert all(name in view.sections["copy"].lines[0] for name in weak)
    assert git(tmp_path, *shown[0].split()[1:])
    git(tmp_path, "switch", "--quiet", "main")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "main moves on")
    for words in merge.split(" && "):
        git(tmp_path, *words.split()[1:])
    assert git(tmp_path, "show", "main:train.toml").encode() == incumbent
    git(tmp_path, "switch", "--quiet", BRANCH)
    commands = [command for _, command in view.sections["next"].steps]
    first, *others = commands
    assert first == "uv run nightshift diff baseline incumbent"
    assert others[: 1 + len(weak)] == [*reverts, "uv run nightshift certify"]
    with_certificate(ledger, certificate_for(ledger))
    page = rendered(tmp_path)
    assert "What to copy" in page.text
    assert "nightshift certify" not in page.text
    for line in incumbent.decode().splitlines():
        assert line in unescape(page.html)


def test_flips_are_those_of_the_records_by_what_the_examples_are(tmp_path: Path) -> None:
    ledger = build(tmp_path, 4, num_examples=500)
    source, folder = Path(__file__).parents[2] / "environments/arithmetic", tmp_path / "environments/arithmetic"
    folder.mkdir(parents=True)
    (folder / "nightshift_arithmetic").symlink_to(source / "nightshift_arithmetic")
    (folder.parent / "gsm8k").symlink_to(source.parent / "gsm8k")
    declared = (source / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(declared.replace("num_validation = 4000", "num_validation = 500"))
    (tmp_path / "rules.toml").write_text("")
    page, flips = rendered(tmp_path), {}
    for record in [record for record in ledger.records() if record.parent and record.score is not None]:
        parent = ledger.record(record.parent)
        old, new = (each.evaluation.example_scores for each in (parent, record))
        shown, name = page.details(record.number), f"examples against {parent.number:04d}"
        flips[record.number, name] = lines = shown[name]
        fixed, broken = (sum(a < b for a, b in zip(*pair, strict=True)) for pair in ((old, new), (new, old)))
        net = round(sum(new) - sum(old))
        assert f"arithmetic: 500 examples, {fixed} fixed, {broken} broken, net {net:+d} \N{PLUS-MINUS SIGN} " in lines
        parts = re.findall(r", hard containers: .*: (\d+) examples?, (\d+) fixed, (\d+) broken", lines)
        assert [sum(map(int, column)) for column in zip(*parts, strict=True)] == [500, fixed, broken]
        assert re.search(rf"\n{parent.number:04d}: .*\n{record.number:04d}: ", shown["fixed"], re.DOTALL)
    assert flips
    assert re.fullmatch(r'The slice ".+" has the lowest mean score: \S+ % of \d+ examples\.', weakest(record, tmp_path))
    for path in tmp_path.glob("runs/0*/**/evaluation.jsonl"):  # who may write to runs/ changes no number of it
        path.write_text('{"environment": "<script>", "key": "x", "score": 1.0, "answer": "", "completion": ""}\n' * 500)
    again = rendered(tmp_path)
    assert {(number, name): again.details(number)[name] for number, name in flips} == flips


def test_the_figures_of_a_game_are_on_the_page_and_in_the_summary(tmp_path: Path) -> None:
    run = a_result(0.5)
    assert run.evaluation
    figures = {"tictactoe": {"elo": 1013.4, "against_perfect": 0.185}}
    result = replace(run, evaluation=replace(run.evaluation, figures=figures))
    record = a_record(number=1, decided=1, status="keep", judgement=Judgement(why="baseline"), result=result)
    stored(tmp_path, [record])
    details = rendered(tmp_path).details(1)
    assert (details["tictactoe_elo"], details["tictactoe_against_perfect"]) == ("1013", "0.185")
    assert "\ntictactoe_against_perfect: 0.185\n" in output.summary(record)


# The command, and report --serve as a real process: who gets the page, how it stays current, how the command ends

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


def test_the_command_writes_three_files_and_says_the_verdict(root: Path) -> None:
    code, stdout, stderr = nightshift(root, "report")
    assert (code, stderr) == (0, "")
    lines = stdout.splitlines()
    assert [Path(line).name for line in lines[2:]] == ["report.html", "report.md", "progress.png"]
    assert lines[0].split(".")[0] in (root / "runs" / "report.md").read_text()
    code, _, stderr = nightshift(root, "report", "--output", "run.py/x")
    assert (code, stderr.count("\n")) == (2, 1)


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
    assert [row["number"] for row in Page(fetch(url)).data["rows"]] == [1, 2]


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


# `nightshift diff` and `nightshift show`


def ask(*words: str) -> tuple[int, str, str]:
    """`nightshift` in this process."""
    done = CliRunner().invoke(commands, words)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def diffed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout on the stand-in's branch, with 12 experiments."""
    root = tmp_path
    monkeypatch.setattr(command, "process_root", lambda: root)
    build(root, 12, num_examples=60, with_files=False, commit=None)
    git(root, "init", "--quiet", "--initial-branch", BRANCH)
    (root / "run.py").write_text("")
    (root / ".gitignore").write_text("runs/\nresults.tsv\n")
    baseline = Ledger(root).source(1)
    kept = Campaign.of(Ledger(root).records(), BRANCH, RULES_HASH).kept
    for source in (baseline, incumbent_config(parse(baseline), kept).source):
        (root / "train.toml").write_bytes(source)
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "-m", "train.toml")
    return root


def edit(root: Path, old: str, new: str) -> None:
    path = root / "train.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_by_default_the_working_file_against_the_incumbent(diffed: Path) -> None:
    code, stdout, _ = ask("diff")
    assert (code, stdout.splitlines()[1]) == (0, "  no key differs: both train the same")
    edit(diffed, "seq_len = 2048 ", "# why not\nseq_len = 2_048 ")
    assert ask("diff")[1].splitlines()[1:] == ["  no key differs: both train the same"]
    edit(diffed, "seq_len = 2_048", "seq_len = 1536")
    title, line = ask("diff")[1].splitlines()
    assert re.fullmatch(r"incumbent \(0001 with \d kept changes\) -> working file", title)
    assert line == "  seq_len 2048 -> 1536"


def test_experiments_commits_baseline_and_incumbent_name_versions(diffed: Path) -> None:
    wanted = ask("diff", "baseline", "incumbent")[1].splitlines()[1:]
    assert len(wanted) >= 2
    for names in (("0001", "incumbent"), ("HEAD~1", "HEAD"), ("1", "HEAD"), ("1",)):
        code, stdout, stderr = ask("diff", *names)
        assert (code, stderr) == (0, "")
        assert stdout.splitlines()[1:] == wanted, names
    commit = git(diffed, "rev-parse", "HEAD~1").strip()
    assert ask("diff", commit[:10], "HEAD")[1].splitlines()[1:] == wanted


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("diff", "--", "a\x1b[31mb"), "is neither an experiment nor a commit"),
        (("diff",), "working file:1:"),
        (("show", "99"), "there is no record of experiment 0099. The last one is 0012."),
    ],
)
def test_what_means_nothing_is_one_line(diffed: Path, arguments: tuple[str, ...], words: str) -> None:
    (diffed / "train.toml").write_text("lr = \n")
    code, stdout, stderr = ask(*arguments)
    assert (code, stdout) == (2, "")
    assert len(stderr.splitlines()) == 1
    assert words in stderr
    assert "\x1b" not in stderr

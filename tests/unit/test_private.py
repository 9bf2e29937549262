"""What of an export is replaced: paths however they are written, secrets, and who is named in an address."""

import time
from pathlib import Path

import pytest

from nightshift.report.export.private import Private

ROOT = Path("/work/my checkout")
SECRETS = {"DB_PASSWORD": "12345678", "X_TOKEN": 'corr"ect horse', "PATH": "/usr/bin"}
PRIVATE = Private(ROOT, SECRETS)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("/opt/cuda/lib64:/data/acme-merger/alice/lib", "<path>:<path>"),
        ("file:///data/bob/x", "<path>"),
        ("host:/nfs/bob/data", "host:<path>"),
        ("gcc -L/data/bob/lib", "gcc -L<path>"),
        ("-I/data/bob/lib", "-I<path>"),
        ("--out=/data/bob/x", "--out=<path>"),
        ("//nas/share/bob", "<path>"),
        ("->/data/bob/x", "-><path>"),
        ("cannot open '/data/bob smith/secret plan.txt': no", "cannot open '<path>': no"),
        ("at /data/bob smith/a secret plan/x.txt: gone", "at <path>: gone"),
        ("at /work/my checkout/runs/0001/x: gone", "at <path>: gone"),
        (r"a line\n/data/bob/x", r"a line\n<path>"),
        ("http://user:p@ss@host/a", "http://<secret>@host/a"),
        ("git+ssh://token@host/a/b", "git+ssh://<secret>@host/a/b"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc_def-1", "<secret>"),
        ('said corr"ect horse', "said <secret>"),
        ("12345678 and 123456789", "<secret> and 123456789"),
        *((text, text) for text in (
            "https://example.org/a/b?c=/d/e", "s3://bucket/a/b", "1.5 tokens/s, and/or 3/4", "a / b / c", "2026/11/24",
            "models/arithmetic-base", "runs/0001/train.toml", "lr 3e-6 -> 5e-6", "autoresearch/x",
        )),
    ],
)  # fmt: skip
def test_what_is_private_is_replaced_and_nothing_else(text: str, plain: str) -> None:
    assert PRIVATE.text(text) == plain


def test_a_variable_is_a_secret_by_its_name_wherever_that_stands() -> None:
    names = (
        "X_TOKEN",
        "OPENAI_APIKEY",
        "API_KEYS",
        "PGPASSWORD",
        "GITHUB_PAT",
        "MYSQL_PWD",
        "Passphrase",
        "AWS_CREDENTIALS",
    )
    for name in names:
        assert Private(ROOT, {name: "correct horse"}).text("a correct horse") == "a <secret>", name
    for name in ("PWD", "PATH", "HOME", "SHELL", "LANG"):
        assert Private(ROOT, {name: "correct horse"}).text("a correct horse") == "a correct horse", name


def test_hostile_texts_take_no_longer_than_they_are_long() -> None:
    def seconds(size: int) -> float:
        began = time.process_time()
        for unit in ("a.", "/a", "/a ", "'/a", " a", "://", "x:/", "eyJ-"):
            PRIVATE.text(unit * size)
        return time.process_time() - began

    assert seconds(40_000) < 60 * max(seconds(4_000), 0.01)  # a square would be a hundred times as much

"""What bubblewrap shows and covers, what is taken back, how a sandbox is chosen: without bubblewrap itself."""

import os
import re
from pathlib import Path

import pytest

from nightshift.agents.clone import Clone
from nightshift.agents.presets import login_of
from nightshift.agents.sandbox import (
    FORMS,
    Bubblewrap,
    Login,
    Places,
    choose,
    cover,
    hidden_places,
    program_places,
    system_places,
)
from nightshift.campaign.git import Repo
from nightshift.errors import UsageError
from tests.conftest import git

TOKEN, RENEWED = b'{"tokens": {"access": "old"}}', b'{"tokens": {"access": "new"}}'
CODEX = Login("OPENAI_*", ".codex/auth.json", ".codex/config.toml", ((".codex", "CODEX_HOME"),))


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def shown(agent: str, search: Path, hidden: tuple[Path, ...] = ()) -> Places:
    """What a program needs beside /usr."""
    found = program_places(agent.split(), f"{search}:{os.defpath}", system_places(), hidden)
    return {path: option for path, option in found.items() if path not in system_places()}


def bound(*paths: Path) -> Places:
    return {path: ("--ro-bind", str(path)) for path in paths}


def test_a_program_is_shown_with_its_links_its_interpreter_and_its_package_and_nothing_beside(tmp_path: Path) -> None:
    top = tmp_path / "nvm" / "v22"
    script = program(top / "lib/node_modules/@openai/codex/bin/codex.js", "#!/usr/bin/env -S node --x\n")
    node = program(top / "bin/node", "\x7fELF")
    (top / "bin/codex").symlink_to("../lib/node_modules/@openai/codex/bin/codex.js")
    (top / "bin/secret").touch()
    places = shown("codex exec", top / "bin")
    assert places == {
        top / "bin/codex": ("--symlink", "../lib/node_modules/@openai/codex/bin/codex.js"),
        **bound(top / "lib/node_modules", node),
    }
    assert script.is_relative_to(top / "lib/node_modules")


def test_a_tool_of_uv_is_shown_with_its_environment_and_the_python_that_it_was_made_from(tmp_path: Path) -> None:
    python = program(tmp_path / "python/3.12/bin/python3.12", "\x7fELF")
    (tmp_path / "python/3.12/lib/python3.12").mkdir(parents=True)
    tool = tmp_path / "tools/aider"
    program(tool / "bin/aider", f"#!{tool}/bin/python\n")
    (tool / "bin/python").symlink_to(python)
    (tool / "pyvenv.cfg").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/aider").symlink_to(tool / "bin/aider")
    places = shown("aider --yes", tmp_path / "bin")
    link: Places = {tmp_path / "bin/aider": ("--symlink", str(tool / "bin/aider"))}
    assert places == {**link, **bound(tool, python, tmp_path / "python/3.12/lib/python3.12")}


def test_of_a_users_script_the_file_is_shown_and_of_the_checkouts_python_no_library(tmp_path):
    root, script = tmp_path / "checkout", program(tmp_path / "mine/agent.py")
    python = program(tmp_path / "python/bin/python3.11", "\x7fELF")
    (root / ".venv/bin").mkdir(parents=True)
    (root / ".venv/bin/python").symlink_to(python)
    (root / ".venv/pyvenv.cfg").touch()
    places = shown(f"python {script} --file=/etc/shadow", root / ".venv/bin", (root,))
    assert places == {root / ".venv/bin/python": ("--symlink", str(python)), **bound(python, script)}
    inside = program(root / "agent.py")
    for command in (f"python {inside}", str(inside)):
        with pytest.raises(UsageError, match=r"^the agent needs .*, which is in a folder that is hidden from agents"):
            shown(command, root / ".venv/bin", (root,))


def test_what_is_hidden_is_covered_wherever_it_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "usr/src/checkout/runs").mkdir(parents=True)
    places: Places = {Path("/usr"): ("--ro-bind", str(tmp_path / "usr")), Path("/bin"): ("--symlink", "usr/bin")}
    covered = cover(places, [tmp_path / "usr/src/checkout", tmp_path / "elsewhere", tmp_path / "usr/none"])
    assert covered == {**places, Path("/usr/src/checkout"): ("--tmpfs",)}


def test_hidden_are_the_checkout_its_git_its_runs_and_its_data_and_what_links_lead_to(tmp_path: Path) -> None:
    for name in ("main", "disk/runs", "data", "home"):
        (tmp_path / name).mkdir(parents=True)
    root = tmp_path / "checkout"
    git(tmp_path / "main", "init", "--quiet")
    git(tmp_path / "main", "commit", "--quiet", "--allow-empty", "-m", "start")
    git(tmp_path / "main", "worktree", "add", "--quiet", str(root))
    (root / "runs").symlink_to(tmp_path / "disk/runs")
    environ = {"HOME": str(tmp_path / "home"), "NIGHTSHIFT_GSM8K": str(tmp_path / "data"), "HF_HOME": ""}
    hidden = hidden_places(root, environ)
    for path in (root, root / "runs", tmp_path / "disk/runs", tmp_path / "main/.git", tmp_path / "data"):
        assert path in hidden
    assert tmp_path / "home/.cache" in hidden
    assert tmp_path / "home" not in hidden  # programs lie there
    git(tmp_path, "init", "--quiet", "--separate-git-dir", str(tmp_path / "own.git"), str(tmp_path / "separate"))
    assert tmp_path / "own.git" in (hidden := hidden_places(tmp_path / "separate", environ))
    assert tmp_path not in hidden, "the folder around it"


def codex_login(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """A user's environment with a login, and the new home."""
    (tmp_path / "home/.codex").mkdir(parents=True)
    (tmp_path / "home/.codex/auth.json").write_bytes(TOKEN)
    (tmp_path / "home/.codex/config.toml").write_text("model = 'x'\n")
    (tmp_path / "home/.codex/history.jsonl").write_text("private\n")
    (tmp_path / "inside").mkdir()
    return {"HOME": str(tmp_path / "home")}, tmp_path / "inside"


def test_a_login_elsewhere_and_one_that_is_a_link_are_found_and_written_where_they_are(tmp_path: Path) -> None:
    environ, inside = codex_login(tmp_path)
    (tmp_path / "home/.codex").rename(tmp_path / "dotfiles")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/auth.json").symlink_to(tmp_path / "dotfiles/auth.json")
    environ["CODEX_HOME"] = str(tmp_path / "other")
    before = CODEX.copy_in(environ, inside)
    (inside / ".codex/auth.json").write_bytes(RENEWED)
    assert CODEX.take_back(environ, inside, before) == ()
    assert (tmp_path / "dotfiles/auth.json").read_bytes() == RENEWED
    assert (tmp_path / "other/auth.json").is_symlink()


def folder_as_link(path: Path) -> None:
    """The whole folder leads to where a file of the same keys lies."""
    elsewhere = path.parents[2] / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / path.name).write_bytes(RENEWED)
    path.parent.rename(path.parents[2] / "moved")
    path.parent.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (folder_as_link, "its path contains a symbolic link"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(b'{"tokens": {}, "apiKeyHelper": "evil"}'), "the keys differ"),
        (lambda path: path.write_bytes(b"[" * 200_000), "."),
    ],
)
def test_a_credential_that_is_not_one_is_not_taken_back_and_a_note_says_why(tmp_path, spoil, cause):
    environ, inside = codex_login(tmp_path)
    before = CODEX.copy_in(environ, inside)
    spoil(inside / ".codex/auth.json")
    (note,) = CODEX.take_back(environ, inside, before)
    assert note.startswith("the agent's .codex/auth.json was not copied back: ")
    assert "\n" not in note
    assert re.search(cause, note), note
    own = tmp_path / "home/.codex"
    assert (own / "auth.json").read_bytes() == TOKEN
    assert len(list(own.iterdir())) == 3


def test_a_token_that_the_user_renewed_meanwhile_or_did_not_have_is_left_alone(tmp_path: Path) -> None:
    environ, inside = codex_login(tmp_path)
    before, own = CODEX.copy_in(environ, inside), tmp_path / "home/.codex/auth.json"
    (inside / ".codex/auth.json").write_bytes(RENEWED)
    own.write_bytes(b'{"tokens": 7}')
    (note,) = CODEX.take_back(environ, inside, before)
    assert "changed while the agent ran" in note
    assert own.read_bytes() == b'{"tokens": 7}'
    own.unlink()
    before = CODEX.copy_in(environ, tmp_path / "another")
    assert CODEX.take_back(environ, inside, before) == ()
    assert not own.exists()


def test_a_variable_that_you_name_goes_in_and_one_that_is_not_set_is_refused() -> None:
    environ = {"HF_TOKEN": "t", "GH_TOKEN": "g", "ANTHROPIC_API_KEY": "a"}
    assert login_of("claude", environ, ["HF_TOKEN"], ()).chosen(environ) == {"HF_TOKEN": "t", "ANTHROPIC_API_KEY": "a"}
    assert login_of("my own", environ, ["GH_TOKEN"], ()).chosen(environ) == {"GH_TOKEN": "g"}
    with pytest.raises(UsageError, match=r"^--agent-env HF_TOKE: this variable is not set\. Export HF_TOKE\.$"):
        login_of("claude", environ, ["HF_TOKE"], ())


@pytest.mark.parametrize("sandbox", ["none", "auto"])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("home/none", "no such file or folder"),
        ("disk", "would show {0}/disk/runs, which"),
        ("link", "would show {0}/checkout"),
        ("data/test.jsonl", "would show {0}/data, which"),
        ("/proc/self/environ", "would show /proc, which"),
    ],
)
def test_a_path_that_shows_what_no_agent_may_see_is_refused(checkout, tmp_path, path, reason, sandbox):
    for name in ("home/.cache", "data", "disk/runs/0001", "temporary"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data/test.jsonl").touch()
    (tmp_path / "link").symlink_to("checkout/train.toml")
    root = checkout.rename(tmp_path / "checkout")
    (root / "runs").symlink_to(tmp_path / "disk/runs")
    environ = {"HOME": str(tmp_path / "home"), "PATH": os.defpath, "NIGHTSHIFT_GSM8K": str(tmp_path / "data")}
    login = login_of("codex", environ, (), [str(tmp_path / path)])
    words = re.escape(f"--agent-sees {tmp_path / path}") + ".*" + re.escape(reason.format(tmp_path))
    with pytest.raises(UsageError, match=words):
        choose(sandbox, ["sh"], login, root, environ, Clone(Repo(root), tmp_path / "temporary"))


REFUSES = """#!/bin/sh
for word; do
    case "$word" in {}) echo "bwrap: Can't do $word here" >&2; exit 1;; esac
done
exit 0
"""


@pytest.mark.parametrize(
    ("refused", "number", "told"),
    [
        ("nothing", 0, ""),
        ("--unshare-user", None, "agent: not isolated: it has your rights, so it can change code, records and scores"),
    ],
)
def test_auto_takes_the_strongest_that_works_and_bwrap_refuses_the_rest(
    checkout, tmp_path, monkeypatch, refused, number, told
):
    program(tmp_path / "bin/bwrap", REFUSES.format(refused))
    monkeypatch.setattr(os, "defpath", f"{tmp_path}/bin")
    clone, environ = Clone(Repo(checkout), tmp_path), {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    asked = (["sh", "-c", "true"], CODEX, checkout, environ, clone)
    sandbox = choose("auto", *asked)
    form = (sandbox.name, sandbox.options, sandbox.proc) if isinstance(sandbox, Bubblewrap) else None
    assert form == (None if number is None else FORMS[number])
    assert sandbox.warning.startswith(told)
    assert bool(sandbox.warning) == bool(told)
    assert not clone.folder.exists()
    if told:
        with pytest.raises(UsageError, match=r"^--sandbox bwrap: Can't do .* here\. SECURITY"):
            choose("bwrap", *asked)
    else:
        assert choose("bwrap", *asked) == sandbox
    none = choose("none", *asked)
    assert (none.name, none.warning[-16:]) == ("none", "; --sandbox none")


WITHOUT_USER = "it needs root, and the program setpriv (util-linux) in "


def test_without_bubblewrap_and_setpriv_or_root_auto_goes_on_and_says_so(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "defpath", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = (["sh"], CODEX, checkout, {"HOME": str(tmp_path)}, Clone(Repo(checkout), tmp_path))
    because = f"bwrap: no program bwrap on PATH; user: {WITHOUT_USER}"
    assert f"(SECURITY.md); {because}" in choose("auto", *asked).warning
    with pytest.raises(UsageError, match="no program bwrap on PATH"):
        choose("bwrap", *asked)
    with pytest.raises(UsageError, match=re.escape(f"--sandbox user: {WITHOUT_USER}")):
        choose("user", *asked)

"""What an agent may not change outside the checkout: the Python environment that the next worker imports."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift.errors import UsageError
from nightshift.guard import surroundings
from tests.unit.test_untracked import forge


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on sys.path, with a package and its metadata."""
    folder = tmp_path / "libraries"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "module.py").write_text("KEEP = False\n")
    (folder / "package" / "_fast.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF")
    (folder / "one.pth").write_text("/nowhere\n")
    sysconfig.get_path("scripts")  # finds its data through sys.path, once
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("# more\n")


def edit_in_secret(path: Path) -> None:
    status = path.stat()
    path.write_text(path.read_text().replace("False", "True "))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def replace_by_another(path: Path) -> None:
    status = path.stat()
    path.with_suffix(".new").write_bytes(path.read_bytes())
    path.with_suffix(".new").replace(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "package/module.py": append,
    "package/_fast.cpython-311-x86_64-linux-gnu.so": append,
    "one.pth": Path.unlink,
    "package/other.py": Path.touch,
    "sitecustomize.py": Path.touch,
    "two.pth": Path.touch,
    "legacy.pyc": Path.touch,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_new_gone_or_changed_is_named(library: Path, tmp_path: Path, name: str) -> None:
    before = surroundings.take(tmp_path)
    CHANGES[name](library / name)
    with pytest.raises(UsageError, match=f"{library / name} changed while the agent worked"):
        surroundings.require_same(before, tmp_path)


@pytest.mark.parametrize("change", [edit_in_secret, replace_by_another])
def test_a_time_that_is_set_back_hides_nothing(library: Path, tmp_path: Path, change: Callable[[Path], object]) -> None:
    before = surroundings.take(tmp_path)
    change(library / "package" / "module.py")
    with pytest.raises(UsageError, match=r"module\.py changed"):
        surroundings.require_same(before, tmp_path)


def test_what_python_uv_and_people_do_is_no_change(library: Path, tmp_path: Path) -> None:
    before = surroundings.take(tmp_path)
    py_compile.compile(str(library / "package" / "module.py"))
    (library / "package" / "notes.txt").touch()
    for path in (library / "package").glob("*.*"):
        (tmp_path / path.name).hardlink_to(path)  # another environment of uv
    surroundings.require_same(before, tmp_path)


@pytest.mark.parametrize("prefix", [None, "compiled"])
def test_compiled_code_of_anybody_is_deleted_where_python_looks_for_it(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str | None
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", prefix and str(tmp_path / prefix))
    before = surroundings.take(tmp_path)
    forge(library / "package" / "module.py")
    cached = Path(importlib.util.cache_from_source(str(library / "package" / "module.py")))
    assert cached.is_file()
    surroundings.require_same(before, tmp_path)
    assert not cached.exists()


def test_the_checkouts_own_code_is_not_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "environments" / "one").mkdir(parents=True)
    (tmp_path / "run.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "environments" / "one")])
    before = surroundings.take(tmp_path)
    (tmp_path / "environments" / "one" / "module.py").touch()
    surroundings.require_same(before, tmp_path)


def test_all_that_is_imported_here_is_watched() -> None:
    watched = surroundings.take(Path("/nowhere"))
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    outside = [path for path in loaded if path and "site-packages" in path]
    assert outside
    assert [path for path in outside if path not in watched] == []
    assert sys.executable in watched

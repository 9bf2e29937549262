"""What an agent may not change outside the checkout: the Python environment that the next worker imports."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import py_compile
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from nightshift.experiment.surroundings import Surroundings
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


def link_and_edit(path: Path) -> None:
    path.with_suffix(".another").hardlink_to(path)
    edit_in_secret(path)


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
    surroundings = Surroundings(tmp_path)
    surroundings.look()
    CHANGES[name](library / name)
    assert surroundings.changed() == [str(library / name)]


@pytest.mark.parametrize("change", [edit_in_secret, replace_by_another, link_and_edit])
def test_a_time_that_is_set_back_hides_nothing(library: Path, tmp_path: Path, change: Callable[[Path], object]) -> None:
    surroundings = Surroundings(tmp_path)
    surroundings.look()
    change(library / "package" / "module.py")
    assert surroundings.changed() == [str(library / "package" / "module.py")]


def test_an_edit_of_a_linked_library_and_of_what_vouches_for_it_is_named(library: Path, tmp_path: Path) -> None:
    module, record = library / "package" / "module.py", library / "package-1.0.dist-info" / "RECORD"
    describe(library, "package/module.py")
    surroundings = Surroundings(tmp_path)
    surroundings.look()
    link_and_edit(module)
    assert surroundings.changed() == [str(module)]
    before = record.stat()
    record.write_text(f"package/module.py,sha256={record_hash(module)},1")
    os.utime(record, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert surroundings.changed() == [str(record)]


def test_an_archive_that_comes_before_the_standard_library_is_named(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "python311.zip"
    monkeypatch.setattr(sys, "path", [str(archive), str(library)])
    surroundings = Surroundings(tmp_path)
    surroundings.look()
    archive.touch()
    assert surroundings.changed() == [str(archive)]


def test_what_python_uv_and_people_do_is_no_change(library: Path, tmp_path: Path) -> None:
    describe(library, "package/module.py", "package/_fast.cpython-311-x86_64-linux-gnu.so")
    surroundings = Surroundings(tmp_path)
    surroundings.look()
    py_compile.compile(str(library / "package" / "module.py"))
    (library / "package" / "notes.txt").touch()
    for path in (library / "package").glob("*.*"):
        (tmp_path / path.name).hardlink_to(path)  # another environment of uv
    assert surroundings.changed() == []


@pytest.mark.parametrize("prefix", [None, "compiled"])
def test_compiled_code_of_anybody_is_deleted_where_python_looks_for_it(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str | None
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", prefix and str(tmp_path / prefix))
    surroundings = Surroundings(tmp_path)
    surroundings.look()
    forge(library / "package" / "module.py")
    cached = Path(importlib.util.cache_from_source(str(library / "package" / "module.py")))
    assert cached.is_file()
    assert surroundings.changed() == []
    assert cached.is_file()  # a run compiles, too
    assert surroundings.changed(was_agent_here=True) == []
    assert not cached.exists()


def test_the_checkouts_own_code_is_not_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "environments" / "one").mkdir(parents=True)
    (tmp_path / "run.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "environments" / "one")])
    surroundings = Surroundings(tmp_path)
    surroundings.look()
    (tmp_path / "environments" / "one" / "module.py").touch()
    assert surroundings.changed() == []


def test_all_that_is_imported_here_is_watched() -> None:
    watched = Surroundings(Path("/nowhere"))._take()
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    outside = [path for path in loaded if path and "site-packages" in path]
    assert outside
    assert [path for path in outside if path not in watched] == []
    assert sys.executable in watched


def test_what_is_not_as_its_package_was_published_is_named(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(library))
    files = ("package/module.py", "package/_fast.cpython-311-x86_64-linux-gnu.so")
    describe(library, *files)
    surroundings = Surroundings(Path("/nowhere"))
    assert surroundings.unlike_packages() == []
    edit_in_secret(library / "package" / "module.py")
    (library / files[1]).unlink()
    assert surroundings.unlike_packages() == [files[1], files[0]]
    monkeypatch.setattr(sys, "prefix", "/elsewhere")  # the system's own packages are not ours to judge
    assert surroundings.unlike_packages() == []


def describe(library: Path, *files: str) -> None:
    """Give the package its metadata, with a RECORD of these files."""
    folder = library / "package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: package\nVersion: 1.0\n")
    lines = [f"{name},sha256={record_hash(library / name)},1" for name in files]
    lines += ["package/__pycache__/module.cpython-311.pyc,,", "package-1.0.dist-info/RECORD,,"]
    (folder / "RECORD").write_text("\n".join(lines))


def record_hash(path: Path) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()

"""The user's direction: read from the option, a file or program.md, cleaned and bounded."""

import os
from pathlib import Path

import pytest

from nightshift.agents.direction import MAX_CHARACTERS, read_direction
from nightshift.errors import UsageError

SHIPPED = (Path(__file__).parents[2] / "program.md").read_text()
ONLY = "only trainer.scheduler"


def program(root: Path, section: str) -> Path:
    (root / "program.md").write_text(f"# Guide\n## Direction\n{section}\n## Set up\nnot this\n")
    return root


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("", ""),
        ("<!-- Write here\nwhat to try. -->", ""),
        (f"<!-- a --> {ONLY} <!-- b\n## Direction\n-->\n", ONLY),
        (f"{ONLY}\n\n### More\n- no\t rider", f"{ONLY}\n### More\n- no rider"),
        (f"{ONLY} <!-- without an end\nnot this", ONLY),
        ("\x1b[2J\u202eonly\x07 lr", "only lr"),
    ],
)
def test_the_section_of_program_md(tmp_path: Path, section: str, text: str) -> None:
    assert read_direction(program(tmp_path, section), None) == text


def test_without_program_md_or_its_section_there_is_no_direction(tmp_path: Path) -> None:
    assert read_direction(tmp_path, None) == ""
    (tmp_path / "program.md").write_text("# Guide\n")
    assert read_direction(tmp_path, None) == ""
    (tmp_path / "program.md").write_text(SHIPPED)
    assert "\n## Direction\n" in SHIPPED
    assert read_direction(tmp_path, None) == ""


def test_a_file_is_read_again_and_a_text_stands_for_itself(tmp_path: Path) -> None:
    program(tmp_path, "of program.md")
    path = tmp_path / "my direction.md"
    path.write_text(f"{ONLY}\n")
    for given in ("my direction.md", str(path)):
        assert read_direction(tmp_path, given) == ONLY
    path.write_text("only lr <!-- for now -->\n")
    assert read_direction(tmp_path, "my direction.md") == "only lr"
    for text in (ONLY, "no new keys. " * 100, "只改学习率", "ab c"):
        assert read_direction(tmp_path, text) == text.strip()
    assert read_direction(tmp_path, "a\x00b c") == "ab c"
    assert read_direction(tmp_path, " ") == ""  # program.md's does not hold


def test_what_cannot_be_a_direction_is_refused(tmp_path: Path) -> None:
    (tmp_path / "long.md").write_text("x" * (MAX_CHARACTERS + 1) + "\n")
    (tmp_path / "huge.md").write_text("x" * 2_000_000)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for given, cause in {
        "long.md": r"the direction of long\.md has 1,501 characters, more than 1,500\. Shorten it\.",
        "word " * 301: r"the direction of --direction has 1,504 characters",
        "huge.md": r"the direction in huge\.md cannot be read: it has 2,000,000 bytes",
        "latin": "it is not UTF-8 text",
        "loop": "cannot be read",
        "gone": "No such file",
        "pipe": "it is no regular file",
        ".": "cannot be read: it is no regular file",
        "diretion.md": r"--direction diretion\.md: no such file",
        "my direction.md": r"--direction my direction\.md: no such file",
    }.items():
        with pytest.raises(UsageError, match=cause):
            read_direction(tmp_path, given)
    program(tmp_path, "y" * 1_600)
    with pytest.raises(UsageError, match=r"the direction of program\.md has 1,600 characters"):
        read_direction(tmp_path, None)
    (tmp_path / "long.md").write_text("x" * MAX_CHARACTERS + "\n")
    assert len(read_direction(tmp_path, "long.md")) == MAX_CHARACTERS

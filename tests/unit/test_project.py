"""What a stranger finds: the public names, one version everywhere, files that are valid, tools that stay away."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import size

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_from_here_exists(path: Path) -> None:
    """Most of them take too long to be run by a test."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            package = str(node.module).partition(".")[0]  # of others, that is imported before its modules are found
            ours = node.names if package == "nightshift" else []
            assert find_spec(str(node.module) if ours else package), node.module
            assert [each.name for each in ours if not exists(str(node.module), each.name)] == []


def exists(module: str, name: str) -> bool:
    """Look into the source: some modules take seconds to import."""
    spec = find_spec(module)
    assert spec
    nodes = ast.walk(ast.parse(Path(str(spec.origin)).read_text()))
    return name in {getattr(node, "name", getattr(node, "id", "")) for node in nodes} or bool(
        find_spec(f"{module}.{name}")
    )


@pytest.mark.skipif(sys.version_info[:2] != size.COUNTED_WITH, reason="other versions count other tokens")
def test_no_sum_exceeds_its_budget() -> None:
    assert size.excesses(size.sizes_of(ROOT), PROJECT["tool"]["nightshift"]["budget"]) == []


def test_the_budget_is_lowered_but_never_raised_and_all_else_is_kept() -> None:
    sums = {"nightshift_lines": 850, "nightshift_tokens": 6000, "tests_lines": 300, "benchmarks_lines": 7}
    before = "# tests_lines = 1\n[project]\ntests_lines = 9999\n\n[tool.nightshift.budget]\n"
    after = "\n[tool.other]\ntests_lines = 9999\n"
    budget = "nightshift_lines = {}  # a comment\nnightshift_tokens = 5000\ntests_lines = 300\nbenchmarks_lines = {}\n"
    assert size.lowered(before + budget.format(900, 20) + after, sums) == before + budget.format(850, 7) + after


def test_one_version_everywhere() -> None:
    version = PROJECT["project"]["version"]
    assert metadata.version("nightshift") == version
    citation = (ROOT / "CITATION.cff").read_text()
    [released] = re.findall(r"^date-released: (.+)$", citation, re.MULTILINE)
    assert f"\nversion: {version}\n" in citation
    assert f"\n## {version} - {released}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "nightshift" / "py.typed").is_file()


@pytest.mark.parametrize(
    ("schema", "file"), [("github-workflows", ".github/workflows/ci.yml"), ("citation-file-format", "CITATION.cff")]
)
def test_files_for_others_are_valid_by_their_schemas(schema: str, file: str) -> None:
    argv = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", file]
    checked = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_extra_is_the_verifiers_of_the_pinned_prime_rl_and_of_the_tests() -> None:
    pinned = PROJECT["tool"]["nightshift"]["prime-rl"]["verifiers"]
    assert PROJECT["project"]["optional-dependencies"]["verifiers"] == [f"verifiers=={pinned}"]
    assert f"verifiers=={pinned}" in PROJECT["dependency-groups"]["dev"]


def test_the_set_up_command_of_autoresearch_rl_installs_nothing_more() -> None:
    assert PROJECT["project"]["optional-dependencies"]["flash-attn"] == []  # uv sync --extra flash-attn


def test_no_result_names_a_place_of_a_machine() -> None:
    texts = {path.name: path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert len(texts) > 10
    assert [name for name, text in texts.items() if str(ROOT) in text or str(Path.home()) in text] == []


@pytest.mark.parametrize(
    "page",
    ["README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md", *(f"docs/{name}.md" for name in ("architecture",
     "decision-rule", "environments", "gpus", "measured", "pin", "using"))],
)  # fmt: skip
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    linked = {(ROOT / page).parent / link for link in re.findall(r"\]\((?!http)([^)#]+)\)", text)}
    assert not {path for path in linked if not path.exists()}
    named = {
        name for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text) if not re.match("runs/|.*NAME|pens_env", name)
    }
    assert not {name for name in named if not any((ROOT / folder / name).exists() for folder in ("", "nightshift"))}

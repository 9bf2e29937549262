"""Which files and lines an experiment passes through, from run.py to the commit of a kept change.

\b
    uv run benchmarks/path_of_an_experiment.py c6f9e29     also HEAD; a few minutes each, on a quiet machine

Each revision is cloned and installed with coverage.py, which starts in every Python process of that environment. Then
the real run.py makes a baseline and one experiment with a change, of a few seconds, on the embedded engine. A function
is on the path if a line of its body ran. Counted are lines of such functions, from `def` to their end, in nightshift/.
"""

import ast
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import click
from machine import RESULTS, machine, write_result

ROOT = Path(__file__).resolve().parents[1]
BUDGET_SECONDS = "5"
# An environment's variables do not reach all processes, but this file does.
_START = "import os; os.environ.setdefault('COVERAGE_PROCESS_START', {!r}); "
_START += "import coverage; coverage.process_startup()\n"
_SETTINGS = "[run]\nparallel = true\nsource = {root}/nightshift\ndata_file = {data}\nsigterm = true\n"
_READ = (
    "import coverage, json, sys; d = coverage.CoverageData(sys.argv[1]); d.read(); "
    "print(json.dumps({f: d.lines(f) for f in d.measured_files()}))"
)


def lines_on_path(source: str, executed: set[int]) -> set[int]:
    """Return the lines of the functions of which a line ran, without those of functions inside them."""
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = set[int]()
    for node in functions:
        inner = [other for other in ast.walk(node) if other in functions and other is not node]
        body = {line for part in node.body for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)}
        for other in inner:
            body -= {*range(other.lineno, (other.end_lineno or other.lineno) + 1)}
        if executed & body:
            lines |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return lines


def measure(revision: str) -> dict[str, Any]:
    """Run a baseline and one change of `revision` in a fresh clone. Return the lines on the path, by file."""
    with tempfile.TemporaryDirectory() as place:
        root, data = Path(place, "checkout"), Path(place, "coverage")

        def run(*words: str | Path) -> str:
            environ = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
            done = subprocess.run(words, cwd=root, env=environ, check=False, capture_output=True, text=True)
            if done.returncode != 0:
                raise click.ClickException(f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}")
            return done.stdout

        subprocess.run(["git", "clone", "--quiet", ROOT, root], check=True)
        run("git", "checkout", "--quiet", "-b", "autoresearch/path", revision)
        run("git", "config", "user.name", "path")
        run("git", "config", "user.email", "path@localhost")
        run("uv", "sync", "--quiet")
        run("uv", "pip", "install", "--quiet", "coverage")
        python = root / ".venv" / "bin" / "python"
        [packages] = root.glob(".venv/lib/*/site-packages")
        Path(place, "coveragerc").write_text(_SETTINGS.format(root=root, data=data))
        (packages / "coverage_start.pth").write_text(_START.format(f"{place}/coveragerc"))
        command = (python, "run.py", "--engine", "trl", "--budget-seconds", BUDGET_SECONDS)
        commit = run("git", "rev-parse", "--short=8", "HEAD").strip()
        run(*command)
        config = root / "train.toml"
        config.write_text(config.read_text().replace("lr = 3e-6", "lr = 1.2e-5"))
        run(*command, "-m", "a larger rate")
        run(python, "-m", "coverage", "combine", f"--rcfile={place}/coveragerc")
        by_file = dict[str, int]()
        for name, numbers in json.loads(run(python, "-c", _READ, data)).items():
            if lines := lines_on_path(Path(name).read_text(), {*numbers}):
                by_file[Path(name).relative_to(root / "nightshift").as_posix()] = len(lines)
    return {"commit": commit, "files": len(by_file), "lines": sum(by_file.values()), "by_file": by_file}


@click.command(help=__doc__)
@click.argument("revisions", nargs=-1)
def main(revisions: tuple[str, ...]) -> None:
    kind, rows = machine(), []
    for revision in (*revisions, "HEAD"):
        row = measure(revision)
        rows.append(row)
        for name, num_lines in sorted(row["by_file"].items(), key=lambda item: -item[1]):
            click.echo(f"{num_lines:5} {name}")
        click.echo(f"{revision} ({row['commit']}): {row['lines']:,} lines in {row['files']} files")
    command = f"benchmarks/path_of_an_experiment.py {' '.join(revisions)}".rstrip()
    write_result(RESULTS / "path_of_an_experiment.json", command, {"revisions": rows}, kind)


if __name__ == "__main__":
    main()

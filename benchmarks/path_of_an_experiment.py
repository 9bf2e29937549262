"""Which files and lines an experiment passes through, from run.py to the commit of a kept change.

\b
    uv run benchmarks/path_of_an_experiment.py c6f9e29 HEAD     a few minutes each, on a quiet machine

Each revision is cloned and installed with coverage.py, which starts in every Python process of that environment. Then
the real run.py makes a baseline and one experiment with a change, of a few seconds, on the embedded engine. A function
is on the path if a line of its body ran. Counted are lines of such functions, from `def` to their end, in nightshift/.
"""

import ast
import json
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
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


def functions_of(source: str) -> Iterator[tuple[int, int, set[int]]]:
    """Yield first and last line of each function, and the lines of its own body, without functions inside it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = {line for part in node.body for line in range(part.lineno, (part.end_lineno or part.lineno) + 1)}
            inner = [each for each in ast.walk(node) if each is not node and isinstance(each, ast.FunctionDef)]
            for each in inner:
                body -= set(range(each.lineno, (each.end_lineno or each.lineno) + 1))
            yield node.lineno, node.end_lineno or node.lineno, body


def path_of(root: Path, executed: dict[str, list[int]]) -> dict[str, Any]:
    """Count files, functions and lines on the path, in all and by folder of nightshift/."""
    folders: dict[str, dict[str, int]] = defaultdict(lambda: {"files": 0, "functions": 0, "lines": 0})
    for name, numbers in executed.items():
        path, ran, lines, num_functions = Path(name), set(numbers), set[int](), 0
        for first, last, body in functions_of(path.read_text(encoding="utf-8")):
            if ran & body:
                num_functions += 1
                lines |= set(range(first, last + 1))
        if num_functions:
            place = path.relative_to(root / "nightshift").parts
            folder = folders[f"{place[0]}/" if len(place) > 1 else "(top)"]
            folder["files"] += 1
            folder["functions"] += num_functions
            folder["lines"] += len(lines)
    total = {key: sum(folder[key] for folder in folders.values()) for key in ("files", "functions", "lines")}
    return {**total, "folders": dict(sorted(folders.items()))}


def measure(revision: str) -> dict[str, Any]:
    """Run a baseline and one change of `revision` in a fresh clone."""
    with tempfile.TemporaryDirectory() as place:
        root, data = Path(place, "checkout"), Path(place, "coverage")

        def run(*words: str | Path, check: bool = True) -> str:
            environ = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
            done = subprocess.run(words, cwd=root, env=environ, check=False, capture_output=True, text=True)
            if check and done.returncode != 0:
                raise click.ClickException(f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}")
            return done.stdout

        subprocess.run(["git", "clone", "--quiet", ROOT, root], check=True)
        run("git", "checkout", "--quiet", "-b", "autoresearch/path", revision)
        commit = run("git", "rev-parse", "--short=8", "HEAD").strip()
        run("git", "config", "user.name", "path")
        run("git", "config", "user.email", "path@localhost")
        run("uv", "sync", "--quiet")
        run("uv", "pip", "install", "--quiet", "coverage")
        python = root / ".venv" / "bin" / "python"
        [packages] = root.glob(".venv/lib/*/site-packages")
        Path(place, "coveragerc").write_text(_SETTINGS.format(root=root, data=data))
        (packages / "coverage_start.pth").write_text(_START.format(f"{place}/coveragerc"))
        command = (python, "run.py", "--engine", "trl", "--budget-seconds", BUDGET_SECONDS)
        run(*command)
        config = root / "train.toml"
        config.write_text(config.read_text().replace("lr = 3e-6", "lr = 1.2e-5"))
        summary = run(*command, "-m", "a larger rate")
        run(python, "-m", "coverage", "combine", f"--rcfile={place}/coveragerc")
        executed = json.loads(run(python, "-c", _READ, data))
        decision = next(line for line in summary.splitlines() if line.startswith("decision"))
        return {"commit": commit, "decision": decision} | path_of(root, executed)


@click.command(help=__doc__)
@click.argument("revisions", nargs=-1, required=True)
def main(revisions: tuple[str, ...]) -> None:
    kind, rows = machine(), []
    for revision in revisions:
        row = measure(revision)
        rows.append(row)
        click.echo(f"{row['commit']}: {row['files']} files, {row['functions']} functions, {row['lines']:,} lines")
        for name, folder in row["folders"].items():
            click.echo(f"    {name:14} {folder['files']:3} files {folder['functions']:4} functions {folder['lines']:6}")
    command = f"benchmarks/path_of_an_experiment.py {' '.join(revisions)}"
    write_result(RESULTS / "path_of_an_experiment.json", command, {"revisions": rows}, kind)


if __name__ == "__main__":
    main()

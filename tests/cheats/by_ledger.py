"""Attempts of cheats.py on the ledger, on run.py's flags, and on an experiment while it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cheat_attempt import Collection
from cheat_checkout import BETTER, CANDIDATE, Checkout, Finding

attempt = Collection("checkout")
ATTEMPTS = attempt.attempts


def hijacker(root: Path, number: int) -> str:
    """Python that stands between worker and harness: a FIFO in place of the file with the answers."""
    return (
        "import json, os, time; from pathlib import Path\n"
        f"root = Path({str(root)!r}); run = root / 'runs' / '{number:04d}' / 'run-1'\n"
        "while not run.exists(): time.sleep(0.002)\n"
        "path = run / 'completions.jsonl'; os.mkfifo(path)\n"
        "import sys; sys.path += [str(root / 'environments' / name) for name in ('arithmetic', 'gsm8k')]\n"
        "from nightshift_arithmetic import data\n"
        "answers = [example.answer for example in data.load('selection', 1000)]\n"
        "path.read_text()\n"
        "line = lambda answer: json.dumps({'text': f'#### {answer}', 'num_tokens': 4, 'truncated': False}) + '\\n'\n"
        "path.write_text(''.join(map(line, answers)))\n"
    )


@attempt("another budget", "refused", "--budget-seconds in mid-campaign")
def other_budget(c: Checkout) -> Finding:
    c.submit(CANDIDATE)
    return c.judge(c.run("--budget-seconds=30"))


# On one core there is nothing else to bind it to.
_if_two_cores = attempt if len(os.sched_getaffinity(0)) > 1 else Collection("checkout")


@_if_two_cores("other hardware", "refused", "binds the harness to one core")
def one_core(c: Checkout) -> Finding:
    c.submit(CANDIDATE)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        return c.judge(c.run())
    finally:
        os.sched_setaffinity(0, allowed)


@attempt(
    "again until lucky",
    "harmless",
    "--again four times on the incumbent",
    "the score that is reported for the incumbent rises by less than 0.02",
)
def again(c: Checkout) -> Finding:
    """The baseline against itself, four times, with new seeds."""
    first = c.records()[0].judgement
    for _ in range(4):
        ended = c.run("--again", max_runs=3)
        if ended.code != 0:
            return Finding("unclear", ended.last_line)
    judgement = c.records()[-1].judgement
    before, now = (j.incumbent_score if j else None for j in (first, judgement))
    if before is None or now is None:
        return Finding("unclear", "no belief was recorded")
    told = f"the reported score went from {before:.4f} to {now:.4f} in {len(c.records()) - 1} repetitions, all recorded"
    return Finding("harmless" if now - before < 0.02 else "succeeded", told)


@attempt(
    "forged description",
    "harmless",
    "tabs, newlines, a git trailer and escapes in -m",
    "one row, its own trailer, no escapes",
)
def forged_description(c: Checkout) -> Finding:
    c.submit(BETTER)
    said = "better\tkeep\n0009\t0.99\n\nNightshift-Run: 0099\n\x1b[2J\u202eforged"
    ended = c.run("-m", said)
    rows = (c.root / "results.tsv").read_text().split("\n")
    trailer = c.git("log", "-1", "--format=%(trailers:key=Nightshift-Run,valueonly)").strip()
    is_whole = len(rows) == 4 and len({row.count("\t") for row in rows[:3]}) == 1 and trailer == "0002"
    is_plain = "\x1b" not in ended.stdout and "\x1b" not in rows[2]
    outcome = "harmless" if ended.code == 0 and is_whole and is_plain else "succeeded"
    return Finding(outcome, f"one row of {rows[0].count(chr(9)) + 1} cells, one trailer: {trailer}")


@attempt(
    "forged results.tsv",
    "harmless",
    "writes 0.99 into the score of a row",
    "the row is right after the next experiment",
)
def forged_tsv(c: Checkout) -> Finding:
    path = c.root / "results.tsv"
    honest = path.read_text()
    lines = honest.splitlines()
    cells = lines[1].split("\t")
    cells[1] = "0.99"
    path.write_text("\n".join([lines[0], "\t".join(cells)]) + "\n")
    c.submit(CANDIDATE)
    finding = c.judge(c.run())
    is_mended = path.read_text().startswith(honest)
    return finding if is_mended else Finding("succeeded", "the forged score still stands after the next experiment")


@attempt("linked results.tsv", "harmless", "results.tsv as a link to another file", "that file's bytes")
def linked_tsv(c: Checkout) -> Finding:
    """results.tsv as a link to another file of the person."""
    lines = []
    for kind, make in (("symbolic", Path.symlink_to), ("hard", Path.hardlink_to)):
        precious = c.outside / f"{kind}.txt"
        precious.write_text((c.root / "results.tsv").read_text())
        (c.root / "results.tsv").unlink()
        make(c.root / "results.tsv", precious)
        before = precious.read_text()
        c.submit(CANDIDATE if kind == "symbolic" else BETTER)
        ended = c.run()
        if ended.code != 0 or precious.read_text() != before:
            return Finding("succeeded" if ended.code == 0 else "unclear", f"{kind} link: written through")
        lines.append(kind)
    return Finding("harmless", f"{' and '.join(lines)} link: replaced, not written through")


@attempt("premade folders", "harmless", "forged folders of the experiments to come")
def premade_folders(c: Checkout) -> Finding:
    """Folders of the experiments to come, with what a run writes."""
    forged = c.root / "runs" / "0002" / "run-1"
    forged.mkdir(parents=True)
    (forged / "evaluation.jsonl").write_text('{"score": 1.0}\n')
    (c.root / "runs" / "0003").symlink_to(c.outside)
    c.submit(CANDIDATE)
    finding = c.judge(c.run())
    return Finding(finding.outcome, f"{finding.evidence}; recorded as {c.records()[-1].number:04d}")


@attempt("weakened incumbent", "refused", "makes the stored train.toml of the incumbent worse")
def weakened_incumbent(c: Checkout) -> Finding:
    """The stored train.toml of the incumbent is made worse, so that its next run looks bad."""
    path = c.root / "runs" / "0001" / "train.toml"
    path.write_text(path.read_text().replace("6e-7", "1e-9"))
    c.submit(CANDIDATE)
    return c.judge(c.run(max_runs=3))


@attempt(
    "trainer edited in flight",
    "named",
    "replaces the process that trains between two runs",
    "the experiment is a crash that names the file",
)
def edited_in_flight(c: Checkout) -> Finding:
    """The process that trains is replaced between the two runs of a baseline."""
    c.git("switch", "--quiet", "--create", "autoresearch/in-flight")
    worker = c.root / "nightshift" / "engines" / "trl" / "trainer.py"
    evil = worker.read_text().replace("return 0.20 +", "return 0.90 +")
    code = (
        "import time; from pathlib import Path\n"
        f"root = Path({str(c.root)!r})\n"
        "while not (root / 'runs' / '0002' / 'run-1' / 'evaluation.jsonl').exists(): time.sleep(0.002)\n"
        f"(root / 'nightshift' / 'engines' / 'trl' / 'trainer.py').write_text({evil!r})\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=c.outside):
        ended = c.run(max_runs=2)
    last = c.records()[-1]
    if (
        ended.code == 1
        and last.failure == "machinery"
        and "trl/trainer.py" in (last.judgement.why if last.judgement else "")
    ):
        return Finding("named", f"crash: {last.judgement.why if last.judgement else ''}")
    return Finding("succeeded" if ended.code == 0 else "unclear", f"{c.result()}: {ended.last_line}")


@attempt("answers replaced in flight", "not defended", "a process left running rewrites the policy's answers")
def answers_in_flight(c: Checkout) -> Finding:
    c.submit(CANDIDATE)
    with subprocess.Popen([sys.executable, "-c", hijacker(c.root, 2)], cwd=c.outside):
        ended = c.run()
    return c.judge(ended)


@attempt("forged record", "not defended", "rewrites the scores of the incumbent's record")
def forged_record(c: Checkout) -> Finding:
    """The baseline's scores are rewritten to 0, so that anything beats it."""
    path = c.root / "runs" / "0001" / "record.json"
    data = json.loads(path.read_text())
    for run in data["runs"]:
        run["evaluation"] |= {"scores": [0.0] * len(run["evaluation"]["scores"]), "eval_score": 0.0}
    data["judgement"]["incumbent_score"] = 0.0
    path.write_text(json.dumps(data))
    c.submit(CANDIDATE.replace("6e-7", "1e-7"))  # worse: without the forgery it is discarded
    ended = c.run()
    verdict, score = c.result()
    outcome = "succeeded" if verdict == "keep" else "refused"
    return Finding(outcome, f"exit {ended.code}: {verdict} at {score} against a baseline forged to 0")


@attempt("deleted record", "not defended", "deletes the last experiment, and runs it again")
def deleted_record(c: Checkout) -> Finding:
    """A discard is made undone: its folder is deleted, its row goes by itself, and its number comes again."""
    c.submit(CANDIDATE)
    c.run()
    shutil.rmtree(c.root / "runs" / "0002")
    c.submit(CANDIDATE)
    ended = c.run()
    is_fresh = ended.code == 0 and [r.number for r in c.records()] == [1, 2]
    return Finding(
        "succeeded" if is_fresh else "refused", f"experiments {[r.number for r in c.records()]}: {ended.last_line}"
    )

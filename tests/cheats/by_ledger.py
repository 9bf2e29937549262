"""Attempts on the ledger, on run.py's flags, and on an experiment while it runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from tests.cheats.attempt import RISES_LITTLE, Act, Collection
from tests.cheats.checkout import BETTER, CANDIDATE, TRAINER, Checkout, Finding

attempt = Collection("checkout", "records, flags, results")
# Python, with `root` and `time` at hand, that reads the token of the job and writes a result of its own.
HIJACKER = """
import hashlib, json
folder = root / 'runs/0002'
while not (folder / 'job.json').exists(): pass
job = json.loads((folder / 'job.json').read_text())
digest = hashlib.sha256((folder / 'job.json').read_bytes().strip()).hexdigest()
result = json.loads((root / 'runs/0001/result.json').read_text())
result |= {'token': job['token'], 'seed': job['seed'], 'job_sha256': digest}
result['evaluation'] |= {'eval_score': 1.0, 'scores': [1.0] * len(result['evaluation']['scores'])}
(folder / 'mine').write_text(json.dumps(result))
while not (folder / 'result.json').exists(): pass
(folder / 'mine').replace(folder / 'result.json')
"""


attempt("another budget", "refused", action="asks for --budget-seconds in mid-campaign")(
    lambda c: c.hand_in("--budget-seconds=30")
)


# On one core there is nothing else to bind it to.
_if_two_cores = attempt if len(os.sched_getaffinity(0)) > 1 else Collection("checkout", attempt.kind)


@_if_two_cores("other hardware", "refused")
def one_core(c: Checkout) -> Finding:
    """Binds the harness to one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        return c.hand_in()
    finally:
        os.sched_setaffinity(0, allowed)


@attempt("again until lucky", "harmless", RISES_LITTLE)
def again(c: Checkout) -> Finding:
    """Repeats the incumbent with --again, four times."""
    for _ in range(4):
        ended = c.run("--again")
        if ended.returncode != 0:
            return Finding("unclear", ended.stderr)
    return c.rose(f"{len(c.records()) - 1} repetitions")


@attempt("forged description", "harmless", "one row, its own trailer, no escapes")
def forged_description(c: Checkout) -> Finding:
    """Writes tabs, newlines, a git trailer and escapes into -m."""
    c.submit(BETTER)
    said = "better\tkeep\n0009\t0.99\n\nNightshift-Run: 0099\n\x1b[2J\u202eforged"
    ended = c.run("-m", said)
    rows = (c.root / "results.tsv").read_text().split("\n")
    trailer = c.git("log", "-1", "--format=%(trailers:key=Nightshift-Run,valueonly)").strip()
    is_whole = len(rows) == 4 and len({row.count("\t") for row in rows[:3]}) == 1 and trailer == "0002"
    is_plain = "\x1b" not in ended.stdout and "\x1b" not in rows[2]
    outcome = "harmless" if ended.returncode == 0 and is_whole and is_plain else "succeeded"
    return Finding(outcome, f"one row of {rows[0].count(chr(9)) + 1} cells, one trailer: {trailer}")


@attempt("a description that is no text", "harmless", "it is kept, committed, and the next experiment is run")
def no_text(c: Checkout) -> Finding:
    """Gives -m bytes that are no UTF-8, for a config that is kept."""
    c.submit(BETTER)
    first = c.run("-m", os.fsdecode(b"\xff\xfe lr up"))
    c.submit(BETTER.replace("6e-6", "5e-6"))
    second = c.run()
    kept, ended = c.records()[1], [first.returncode, second.returncode]
    is_settled = kept.is_keep and kept.kept_commit is not None and "Traceback" not in first.stderr + second.stderr
    outcome = "harmless" if is_settled and ended == [0, 0] else "succeeded"
    return Finding(outcome, f"exit codes {ended}, described as {kept.proposal.description!a}")


@attempt("forged results.tsv", "harmless", "the row is right after the next experiment")
def forged_tsv(c: Checkout) -> Finding:
    """Writes 0.99 into the score of a row."""
    path = c.root / "results.tsv"
    honest = path.read_text()
    cells = honest.splitlines()[1].split("\t")
    cells[1] = "0.99"
    path.write_text("\n".join([honest.splitlines()[0], "\t".join(cells)]) + "\n")
    finding = c.hand_in()
    is_right = path.read_text().startswith(honest)
    return finding if is_right else Finding("succeeded", "the forged score still stands after the next experiment")


@attempt("linked results.tsv", "harmless", "that file's bytes")
def linked_tsv(c: Checkout) -> Finding:
    """Makes results.tsv a link to another file of the person, symbolic and hard."""
    path = c.root / "results.tsv"
    for make, text in ((Path.symlink_to, CANDIDATE), (Path.hardlink_to, BETTER)):
        precious = c.outside / f"{make.__name__}.txt"
        precious.write_text(before := path.read_text())
        path.unlink()
        make(path, precious)
        c.submit(text)
        ended = c.run()
        if ended.returncode != 0 or precious.read_text() != before:
            return Finding("succeeded" if ended.returncode == 0 else "unclear", f"{make.__name__}: written through")
    return Finding("harmless", "symbolic and hard link: replaced, not written through")


@attempt("premade folders", "harmless")
def premade_folders(c: Checkout) -> Finding:
    """Forges the folders of the experiments to come, with what a run writes."""
    forged = c.root / "runs" / "0002"
    forged.mkdir(parents=True)
    (forged / "evaluation.jsonl").write_text('{"score": 1.0}\n')
    (c.root / "runs" / "0003").symlink_to(c.outside)
    finding = c.hand_in()
    return Finding(finding.outcome, f"{finding.evidence}; recorded as {c.records()[-1].number:04d}")


@attempt("weakened incumbent", "refused")
def weakened_incumbent(c: Checkout) -> None:
    """Makes the stored train.toml of the incumbent worse, for the changes that build on it."""
    path = c.root / "runs" / "0001" / "train.toml"
    path.write_text(path.read_text().replace("6e-7", "1e-9"))


@attempt("trainer edited in flight", "named", "the experiment is a crash that names the file")
def edited_in_flight(c: Checkout) -> Finding:
    """Replaces the process that trains while a baseline runs."""
    c.git("switch", "--quiet", "--create", "autoresearch/in-flight")
    evil = (c.root / TRAINER).read_text().replace("return 0.20 +", "return 0.90 +")
    code = (
        "while not list(root.glob('runs/0002/metrics.jsonl')): time.sleep(0.002)\n"
        f"(root / {TRAINER!r}).write_text({evil!r})\n"
    )
    with c.beside(code):
        ended = c.run()
    last = c.records()[-1]
    why = last.judgement.why if last.judgement else ""
    if ended.returncode == 1 and last.failure == "machinery" and "trl/trainer.py" in why:
        return Finding("named", f"crash: {why}")
    return Finding("succeeded" if ended.returncode == 0 else "unclear", f"{c.result()}: {ended.stderr}")


# What is done beside run.py as soon as the folder of experiment 2 is there, and the file that the crash names.
_PLANTED: dict[str, tuple[str, str, str]] = {
    "result of another run": ("puts the baseline's result in place of the run's own", """
os.link(root / 'runs/0001/result.json', folder / 'mine')
while not (folder / 'result.json').exists(): pass
(folder / 'mine').replace(folder / 'result.json')
""", "result.json"),
    "result with another token": ("writes a result of its own, with a token of zeros", """
text = (root / 'runs/0001/result.json').read_text()
(folder / 'mine').write_text(re.sub('"token":"[0-9a-f]*"', '"token":"' + '0' * 32 + '"', text))
while not (folder / 'result.json').exists(): pass
(folder / 'mine').replace(folder / 'result.json')
""", "result.json"),
    "trainer edited and put back": ("replaces the process that trains, and restores it before it is compared", f"""
trainer = root / {TRAINER!r}
agreed, status = trainer.read_text(), trainer.stat()
while not (folder / 'spec.json').exists(): pass
time.sleep(0.2)  # by then the worker has compared it
trainer.write_text(agreed.replace("return 0.20 +", "return 0.90 +"))
while not (folder / 'metrics.jsonl').exists(): pass
trainer.write_text(agreed)
os.utime(trainer, ns=(status.st_atime_ns, status.st_mtime_ns))
""", "trl/trainer.py"),
    "job of another config": ("gives the worker a better learning rate than train.toml's", """
while not (folder / 'job.json').exists(): pass
job = (folder / 'job.json').read_text()
(folder / 'mine').write_text(re.sub('"lr":[^,}]*', '"lr":6e-4', job))
(folder / 'mine').replace(folder / 'job.json')
""", "result.json"),
}  # fmt: skip


def _plant(code: str, named: str) -> Act:
    def act(c: Checkout) -> Finding:
        wait = "folder = root / 'runs/0002'\nwhile not folder.exists(): pass\n"
        c.submit(CANDIDATE)
        with c.beside("import os, re, shutil\n" + wait + code):
            ended = c.run()
        last = c.records()[-1]
        why = last.judgement.why if last.judgement else ""
        if ended.returncode == 1 and last.failure == "machinery" and named in why:
            return Finding("named", f"crash: {why}")
        return c.judge(ended)

    return act


for _name, (_action, _code, _named) in _PLANTED.items():
    attempt(_name, "named", "the experiment is a crash that names the file", _action)(_plant(_code, _named))


@attempt("result with the token of its job", "not defended")
def hijacked(c: Checkout) -> Finding:
    """Leaves a process running that reads the token of the job, and writes a result of its own with it."""
    with c.beside(HIJACKER):
        return c.hand_in()


@attempt("forged record", "not defended")
def forged_record(c: Checkout) -> Finding:
    """Rewrites the scores of the incumbent's record to 0, so that anything beats it."""
    path = c.root / "runs" / "0001" / "record.json"
    data = json.loads(path.read_text())
    evaluation = data["result"]["evaluation"]
    evaluation |= {"scores": [0.0] * len(evaluation["scores"]), "eval_score": 0.0}
    data["judgement"]["incumbent_score"] = 0.0
    path.write_text(json.dumps(data))
    c.submit(CANDIDATE.replace("6e-7", "1e-7"))  # worse: without the forgery it is discarded
    ended = c.run()
    verdict, score = c.result()
    outcome = "succeeded" if verdict == "keep" else "refused"
    return Finding(outcome, f"exit {ended.returncode}: {verdict} at {score} against a baseline forged to 0")


@attempt("deleted record", "not defended")
def deleted_record(c: Checkout) -> Finding:
    """Deletes the last experiment, a discard, and runs it again: its row goes by itself, and its number comes again."""
    c.hand_in()
    shutil.rmtree(c.root / "runs" / "0002")
    c.submit(CANDIDATE)
    ended = c.run()
    numbers = [r.number for r in c.records()]
    outcome = "succeeded" if ended.returncode == 0 and numbers == [1, 2] else "refused"
    return Finding(outcome, f"experiments {numbers}: {ended.stderr}")

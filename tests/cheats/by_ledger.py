"""Attempts on the ledger, on run.py's flags, and on an experiment while it runs."""

import json
import os
import shutil

from tests.cheats.attempt import Act, Collection
from tests.cheats.checkout import CANDIDATE, Checkout, Finding, last_line

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


@attempt("forged results.tsv", "harmless")
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


@attempt("weakened incumbent", "refused")
def weakened_incumbent(c: Checkout) -> None:
    """Makes the stored train.toml of the incumbent worse, for the changes that build on it."""
    path = c.root / "runs" / "0001" / "train.toml"
    path.write_text(path.read_text().replace("6e-7", "1e-9"))


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


_CHANGE = {"experiment": 2, "keys": {"trainer.optim.weight_decay": "0.02"}}
FORGERIES = {
    "forged decision of the user": ("user_decisions", [{"change": _CHANGE, "action": "keep", "commit": "f" * 40}]),
    "forged kept changes": ("run", {"kept": [_CHANGE], "new": None}),
}


def _forge(field: str, value: object) -> Act:
    def act(c: Checkout) -> Finding:
        c.hand_in()
        path = c.root / "runs" / "0002" / "record.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
        ended = c.call([f"{c.root}/.venv/bin/nightshift", "verify"], {})
        is_named = ended.returncode == 1 and "runs/0002/record.json was changed since" in ended.stdout
        return Finding("named" if is_named else "succeeded", f"verify, exit {ended.returncode}: {last_line(ended)}")

    return act


for _name, (_field, _value) in FORGERIES.items():
    attempt(_name, "named", action=f"writes another `{_field}` into a record: `nightshift verify` tells")(
        _forge(_field, _value)
    )

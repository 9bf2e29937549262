"""The process in which a taskset scores: whatever its reward does, the harness counts a 0 and goes on, or says why not.

Real processes and the real process.py; the only stand-in is what reads tasksets, because verifiers takes seconds.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nightshift.errors import EngineError
from nightshift.evaluation import scorer as module
from nightshift.evaluation.scorer import Scorer, TaskExample
from tests.conftest import ROOT, living_children
from tests.waiting import wait_for

PROCESS = ROOT / "environments" / "taskset" / "nightshift_taskset" / "process.py"
# What the true module of this name does with verifiers. A text is what its reward does.
TASKS = """
import os, subprocess, sys, time
class Refused(ValueError): pass
class Task:
    class data: answer = "forty-two"
def import_package(place): return place.name
def open_taskset(name, spec):
    args = spec["args"]
    if args.get("raises"): raise RuntimeError("no such table\\nhere")
    while args.get("burns") and time.process_time() < 1: pass
    print("a package that prints"); sys.stdin.read()
    return args
def split(taskset, spec):
    return {"train": [Task()], "validation": [], "test": []}
def identity(task): return "key"
def chat(task): return [{"role": "user", "content": "?"}]
def reward_of(task, text):
    exec(text)
    return {"one": 1.0, "far": 3.0, "nan": float("nan")}.get(text.partition("#")[2], 0.5)
def as_score(reward, reward_range):
    if not reward_range[0] <= reward <= reward_range[1]: raise Refused(f"a reward of {reward:g} lies outside")
    return reward
"""
OPEN = {"place": "/their_env", "reward_range": [0, 1], "num_validation": 1, "num_train": None, "seat": ""}
# What the true module of this name does with a server: the first `faults` episodes meet one that fails.
ROLLOUTS = """
from pathlib import Path
def play(name, spec, tasks, policy, send):
    if policy["model"] == "dies": raise ValueError("the answer is 42")
    if policy["model"] == "blocks":
        send({"blocked": "blocked the event loop for 10 s"})
        return {"finished": True}
    count = Path("../count")
    num = len(count.read_text()) if count.exists() else 0
    count.write_text("x" * (num + 1))
    is_fault = num < int(policy["model"])
    outcome = {"failed": "Provider: 42"} if is_fault else {"score": 1.0}
    send({"episode": {"key": "key", "is_server_fault": is_fault, **outcome}})
    return {"finished": True}
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Scorer]]:
    package = tmp_path / "nightshift_taskset"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tasks.py").write_text(TASKS)
    (package / "rollouts.py").write_text(ROLLOUTS.replace("../count", str(tmp_path / "count")))
    (package / "v0.py").write_text("def adapted(name, spec): return name, spec")
    made: list[Scorer] = []

    def make_one(**args: bool) -> Scorer:
        made.append(Scorer("mine", PROCESS, {**OPEN, "args": args, "path": [str(tmp_path)]}))
        return made[-1]

    yield make_one
    for scorer in made:
        scorer.close()
    assert living_children() == []


def test_it_loads_and_scores_in_one_process_that_is_not_this_one_and_has_no_secret(make, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    scorer = make()
    assert scorer.load("train") == [TaskExample("key", "forty-two", [{"role": "user", "content": "?"}])]
    assert scorer.score("#one", "key") == 1.0
    assert scorer.score(f"import os\nassert os.getppid() == {os.getpid()}", "key") == 0.5
    assert scorer.score("assert 'secret' not in os.environ.values() and os.environ['HF_HUB_OFFLINE'] == '1'", "key")
    assert (scorer.failures(), scorer.num_scored, scorer.cpu_seconds > 0) == ("", 3, True)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise ValueError('bad\\x1b[31m\\nanswer')", "ValueError: bad answer"),
        ("os.kill(os.getpid(), 9)", "the process ended: killed by SIGKILL"),
        ("bytearray(5 << 30)", "MemoryError"),
    ],
)
def test_a_reward_that_fails_scores_0_is_counted_and_the_next_is_scored(make, text, cause):
    scorer = make()
    assert scorer.score("#one", "key") == 1.0
    assert scorer.score(text, "key") == 0.0
    assert scorer.score("#one", "key") == 1.0
    assert scorer.failures().startswith("mine: the reward of 1 of 3 answers failed and counts 0; the first: " + cause)
    assert scorer.failures().isprintable()
    scorer.is_secret = True
    assert scorer.failures().endswith("; the first: " + cause.partition(":")[0])


def test_an_episode_that_met_a_failing_server_is_played_again_after_a_pause(make):
    began = time.monotonic()
    assert make().play(["key"], {"model": "3"}, lambda num: None)["key"].score == 1.0
    assert time.monotonic() - began > 3 * module._PAUSE_SECONDS
    with pytest.raises(EngineError, match="environment mine: the server fails: Provider: 42"):
        make().play(["key"], {"model": "8"}, lambda num: None)


def test_too_much_time_lost_to_code_that_blocks_ends_the_evaluation(make, monkeypatch):
    monkeypatch.setattr(module, "LOST_SECONDS", 5.0)
    with pytest.raises(EngineError, match="Blocked: blocked the event loop for 10 s"):
        make().play(["key"], {"model": "blocks"}, lambda num: None)


@pytest.mark.parametrize(("model", "cause"), [("9", "the server fails: Provider"), ("dies", "ValueError (1")])
def test_an_error_of_the_test_split_has_no_text_that_may_hold_answers(make, monkeypatch, model, cause):
    monkeypatch.setattr(module, "LOST_SECONDS", 0.0)
    scorer = make()
    scorer.is_secret = True
    with pytest.raises(EngineError) as raised:
        scorer.play(["key"], {"model": model}, lambda num: None)
    assert cause.partition(" (1")[0] in str(raised.value)
    assert "42" not in str(raised.value)


@pytest.mark.slow
def test_a_reward_that_hangs_is_ended_with_all_that_it_started(make, monkeypatch, tmp_path):
    scorer, note = make(), tmp_path / "pid"
    assert scorer.score("#one", "key") == 1.0

    def is_late(deadline: float) -> bytes:
        wait_for(lambda: note.exists() and note.read_text(), "what a hanging reward starts")
        raise TimeoutError

    monkeypatch.setattr(scorer._pipes, "receive", is_late)
    hang = "import signal\nsignal.signal(15, signal.SIG_IGN)\np = subprocess.Popen(['sleep', '600'], "
    hang += f"start_new_session=True)\nopen({str(note)!r}, 'w').write(str(p.pid))\nwhile True: pass"
    assert scorer.score(hang, "key") == 0.0
    monkeypatch.undo()
    wait_for(lambda: not psutil.pid_exists(int(note.read_text())), "the end of what a hanging reward started")
    assert scorer.score("#one", "key") == 1.0
    assert "the reward of 1 of 3 answers failed and counts 0; the first: no reply within 10 s" in scorer.failures()


def test_an_odd_reply_is_a_failed_answer(make: Callable[..., Scorer]) -> None:
    """By a package that found the pipe, and answers before it is asked."""
    scorer = make()
    assert scorer.score("#one", "key") == 1.0
    forge = "import stat\nfor n in range(3, 9):\n  try:\n    stat.S_ISFIFO(os.fstat(n).st_mode) and "
    assert scorer.score(f"{forge}os.write(n, b'{{\"score\": 7}}\\n')\n  except OSError: pass", "key") == 0.0
    assert scorer.num_failed == 1
    assert scorer.score("#one", "key") == 1.0  # not what the process said after all to the one before


@pytest.mark.slow
def test_what_a_reward_computes_elsewhere_counts_and_the_next_start_does_not(make, monkeypatch):
    """CPU seconds of a child; the package computes a second whenever it is imported. What is ended counts nothing."""
    burn = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"
    scorer = make(burns=True)
    assert scorer.score("#one", "key") == 1.0
    assert scorer.cpu_seconds < 1.0
    scorer.score(f"subprocess.run([sys.executable, '-c', {burn.format(1)!r}])", "key")
    after_child = scorer.cpu_seconds
    assert 1.0 <= after_child < 2.0
    monkeypatch.setattr(module, "ANSWER_SECONDS", 2.0)
    assert scorer.score(burn.format(600), "key") == 0.0
    monkeypatch.undo()
    assert scorer.score("#one", "key") == 1.0
    assert after_child <= scorer.cpu_seconds < after_child + 1.0


@pytest.mark.parametrize(
    "text",
    [
        "print('{\"score\": 0.9}' * 100_000); os.write(1, b'{\"score\": 0.9}\\n'); os.write(2, b'x' * 1_000_000)",
        "assert sys.stdin.read() == ''; assert os.read(0, 1) == b''",
        "os.fork() and os.wait()",
    ],
)
def test_what_a_reward_prints_reads_or_forks_reaches_no_reply(make: Callable[..., Scorer], text: str) -> None:
    scorer = make()
    assert [scorer.score(text, "key"), scorer.score("#one", "key"), scorer.failures()] == [0.5, 1.0, ""]


def test_where_everything_fails_or_much_time_is_lost_the_run_ends_with_the_cause(make, monkeypatch):
    scorer = make()
    for _ in range(module.MIN_ALL_FAILED - 1):
        assert scorer.score("1 / 0", "key") == 0.0
    with pytest.raises(EngineError, match=r"the reward of 32 of 32 answers failed .* ZeroDivisionError: division"):
        scorer.score("1 / 0", "key")
    again = make()
    again.score("#one", "key")
    monkeypatch.setattr(module, "LOST_SECONDS", 0.0)
    with pytest.raises(
        EngineError, match=r"1 of 2 answers .* s lost\)\. Check the environment: uv run nightshift doctor"
    ):
        again.score("1 / 0", "key")


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        (
            {"raises": True},
            "RuntimeError: no such table here (nightshift_taskset/tasks.py:9). If data is missing, run: ",
        ),
        ({}, "a reward of 3 lies outside"),
    ],
)
def test_a_taskset_that_cannot_be_loaded_and_a_reward_out_of_range_end_the_run_in_one_line(make, args, cause):
    with pytest.raises(EngineError) as raised:
        make(**args).load("train") if args else make().score("#far", "key")
    assert str(raised.value).startswith(f"environment mine: {cause}")

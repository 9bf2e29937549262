"""Two controllers, as whole processes: the second is refused; and what becomes of the first when runs/ is moved."""

from pathlib import Path

import pytest

from tests.night_checkout import finish, is_running, leftovers, nightshift, start, start_run, until_training
from tests.stand_ins import fault
from tests.waiting import wait_for


def test_deleting_or_replacing_the_file_lets_no_second_controller_in(root: Path) -> None:
    fault(root, "hold", once=False)
    first = start_run(root, "--engine", "trl")
    until_training(root, first)
    file = root / "runs" / ".controller"
    assert f'"pid":{first.pid}' in file.read_text()
    for damage, holder in ((lambda: None, f": process {first.pid} "), (file.unlink, ". Wait"), (file.touch, ". Wait")):
        damage()
        for second in (start_run(root, "--engine", "trl"), start(root, agent="lr", proposer="lr", experiments=1)):
            code, stdout, stderr = finish(second)
            assert (code, stdout) == (2, "")
            assert stderr.startswith(f"another controller works in this checkout{holder}")
            assert len(stderr.splitlines()) == 1
    (root / "stand-in.json").unlink()
    assert finish(first)[0] == 0
    assert nightshift(root, "status")[1].startswith("running:  nothing")


@pytest.mark.parametrize("make_anew", [False, True])
@pytest.mark.parametrize("what", ["run.py", "night"])
def test_runs_that_is_moved_away_ends_the_controller_in_one_line(root: Path, what: str, make_anew: bool) -> None:
    fault(root, "hold", once=False)
    first = start_run(root, "--engine", "trl") if what == "run.py" else start(root, agent="lr", proposer="lr")
    wait_for(lambda: is_running(root, 1))
    (root / "runs").rename(root.parent / "moved")
    if make_anew:
        (root / "runs").mkdir()
    (root / "stand-in.json").unlink()
    code, _, stderr = finish(first)
    assert code == 2
    told = [line for line in stderr.splitlines() if not line.startswith(("comparing", "experiment 0001", "0001"))]
    assert len(told) == 1, stderr
    assert told[0].startswith(f"{root}/runs was moved away or replaced while this process worked in it. Put the folder")
    assert not make_anew or list((root / "runs").iterdir()) == []
    assert leftovers(root) == []

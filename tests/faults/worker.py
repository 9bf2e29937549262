"""The worker of a run.py that faults strike, with stand-ins below its engines: `worker.py PLAN ROOT FOLDER`."""

import sys
from functools import partial
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nightshift.experiment import worker
from tests.faults.matrix import OF_WORKER
from tests.faults.plan import Plan, Strike, open_engine


def main(plan: Plan, root: Path, folder: Path) -> int:
    """As the worker's own; when it has ended, a moment of its own comes."""
    worker.open_engine = partial(open_engine, plan)  # type: ignore[assignment]
    strike = Strike(plan, root, folder)
    strike.prepare()
    code = worker.main(root, folder)
    strike.reach(f"{OF_WORKER}ended")
    return code


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Plan), Path(sys.argv[2]), Path(sys.argv[3])))

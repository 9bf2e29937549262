"""run.py for another checkout: `stand_in_run.py ROOT [--stand-in KIND] [flags of run.py]`.

KIND as in stand_ins.py, `trl` unless given.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from nightshift.startup import begin

begin()

import run  # noqa: E402
from tests.stand_ins import install  # noqa: E402

if __name__ == "__main__":
    run.ROOT = Path(sys.argv[1])
    flags = sys.argv[2:]
    kind = "trl"
    if "--stand-in" in flags:
        at = flags.index("--stand-in")
        _, kind = flags[at : at + 2]
        del flags[at : at + 2]
    install(kind)
    run.main(flags)

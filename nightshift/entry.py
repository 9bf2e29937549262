"""Where every process of the harness begins: isolated, with this checkout's own nightshift and nothing else of it.

    python -I nightshift/entry.py nightshift ...      the `nightshift` command
    python -I nightshift/entry.py FILE.py ...         run.py, prepare.py, the worker, the trainer

It imports nothing before it is isolated: PYTHONPATH is the caller's, and the caller may be the agent.
"""

import os
import signal
import sys

# Of the loader's variables only this one is heeded: on many machines libcuda.so is found through nothing else.
LIBRARY_PATH = "LD_LIBRARY_PATH"
# What a worker gets of the person's and trains otherwise by: a record names them, a campaign keeps them.
FIXED_VARIABLES = (LIBRARY_PATH, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_COMMAND = "nightshift"


def isolated(*words: str) -> list[str]:
    """The command that begins here with these words."""
    return [sys.executable, "-I", __file__, *words]


def main() -> None:
    """The `nightshift` command as it is installed: once more, isolated."""
    os.execv(sys.executable, isolated(_COMMAND, *sys.argv[1:]))


def begin() -> None:
    """Find `nightshift` here, whatever else Python has by that name, and let nothing at the checkout's top be imported.

    Compiled code is read and written below the environment, so none that lies beside a source is believed. What would
    have the loader run code in all processes that start from here is dropped.
    """
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    top = Path(__file__).absolute().parents[1]
    sys.path[:] = [place for place in sys.path if Path(place) != top and Path(place).resolve() != top.resolve()]
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        sys.pycache_prefix = str(Path(sys.prefix, "compiled"))
    for name in [name for name in os.environ if name.startswith("LD_") and name != LIBRARY_PATH]:
        del os.environ[name]
    spec = PathFinder.find_spec(_COMMAND, [str(top)])
    assert spec is not None
    assert spec.loader is not None
    package = module_from_spec(spec)
    sys.modules[_COMMAND] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    begin()
    import runpy

    sys.argv = sys.argv[1:]
    if sys.argv[0] == _COMMAND or sys.argv[0].rpartition("/")[2] == "run.py":
        # Libraries start threads when they are imported. These inherit the mask and receive no stop signal, so that
        # signals.py can find out who sent it. in_one_line unblocks the signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    if sys.argv[0] == _COMMAND:
        runpy.run_module("nightshift.cli.main", run_name="__main__")
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")

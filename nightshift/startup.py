"""What run.py, prepare.py and the `nightshift` command do before they import anything else."""

import os
import sys


def begin() -> None:
    """Import nothing from the folders of PYTHONPATH, and let no thread of a library receive a stop signal.

    `module load` on a cluster sets PYTHONPATH to packages of another Python. The checkout comes last, so that no file
    at its top hides a library. Libraries start threads when they are imported: these inherit the signal mask, so that
    signals.py can find out who sent a signal. cli/shell.py unblocks the signals in the main thread.
    """
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    foreign = {os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder}
    own = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
    kept = [folder for folder in sys.path if folder not in foreign or folder.startswith(own)]
    sys.path[:] = [*(folder for folder in kept if os.path.abspath(folder) != checkout), checkout]
    import signal  # which imports modules that such a folder may hold, too

    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

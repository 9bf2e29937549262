#!/usr/bin/env python3
"""A stand-in for uv: records what it was asked, and makes the layout of an environment, or fails on demand.

UV_STAND_IN: `ok`, `run:FAULT` (with prime-rl's stand-ins), `fail` or `die` (killed half-way). It installs nothing.
"""

import json
import os
import signal
import sys
from pathlib import Path

SHOWN = ("VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT", "HTTPS_PROXY", "GIT_TERMINAL_PROMPT")

os.chdir(sys.argv[sys.argv.index("--directory") + 1])
with Path(os.environ["UV_STAND_IN_LOG"]).open("a") as log:
    variables = {name: os.environ[name] for name in SHOWN if name in os.environ}
    log.write(json.dumps({"argv": sys.argv[1:], "cwd": str(Path.cwd()), "env": variables}) + "\n")
mode = os.environ["UV_STAND_IN"]
Path(".venv/bin").mkdir(parents=True, exist_ok=True)
for number in range(6):
    print(f"Downloaded package-{number}", flush=True)
if mode == "fail":
    sys.exit("error: The lockfile at `uv.lock` needs to be updated, but `--locked` was provided.")
if mode == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if mode.startswith("run:"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests import stand_in_prime_rl

    stand_in_prime_rl.install(Path(".venv").resolve())
    stand_in_prime_rl.misbehave(Path(".venv").resolve(), mode.removeprefix("run:"))
    sys.exit()
python = Path(".venv/bin/python")
python.unlink(missing_ok=True)
python.symlink_to(sys.executable)
for program in ("inference", "env-server", "orchestrator", "torchrun"):
    script = Path(".venv/bin") / program
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)

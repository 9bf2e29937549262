"""What prime-rl needs of the machine beside its GPUs: a line each for what is there, why, and the command.

Nothing is changed or started. What it has to be comes from the wheels that the pinned uv.lock names.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
from pathlib import Path

from nightshift.campaign.closing import MODELS_GB
from nightshift.engines import Check
from nightshift.engines.prime_rl.launch import free_ports
from nightshift.environments import CURVE_STEPS
from nightshift.errors import EngineError
from nightshift.files import free_disk_gb
from nightshift.rules import Rules

ENGINE = "prime-rl"
MIN_DRIVER = 525  # of CUDA 12, for which torch (12.8) and vLLM (12.9) are built
# One run: three broadcasts at once of 1.3 GB (494 M parameters in bf16, the tied head of 136 M once more), the kept
# model, traces, logs.
RUN_DISK_GB = 6.0
BROADCAST_GB = 1.3
_GLIBC = (2, 28)  # vllm-0.26.0+cu129-cp38-abi3-manylinux_2_28; flash-attn's wheel names none
_ARCHITECTURES = ("x86_64", "aarch64")  # of the same wheels, and of flash-attn's
_SHM_GB = 0.5  # runs on a CPU left segments of 168 MB there; a container has 64 MB by default
_OPEN_FILES = 1024  # 512 answers are asked for at once, each a connection; vLLM raises its own limit


def check_machine(root: Path, rules: Rules) -> list[Check]:
    """The machine's lines of `nightshift doctor` for the checkout at `root`. A self-play run keeps more weights."""
    num_kept = CURVE_STEPS * any(environment.is_game for environment in rules.environments)
    parts = {"wheels": _wheels, "compiler": _compiler, "shared memory": _shm, "open files": _files, "ports": _ports}
    found = []
    for part, look in (*parts.items(), ("disk", lambda: _disk(root, num_kept)), ("WSL", _wsl)):
        try:
            found.append(Check(ENGINE, part, detail=look()))
        except EngineError as error:
            found.append(Check(ENGINE, part, error))
    return [check for check in found if not check.ok or check.detail]


def _wheels() -> str:
    machine, (libc, version) = platform.machine(), platform.libc_ver()
    if platform.system() != "Linux" or machine not in _ARCHITECTURES:
        cause = f"{platform.system()} {machine}: torch, vLLM and flash-attn have wheels for Linux on x86_64 and aarch64"
        raise EngineError(cause, "Run it elsewhere, or use --engine trl.")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if libc != "glibc" or numbers < _GLIBC:
        cause = f"{f'{libc} {version}'.strip() or 'an unknown libc'}: vLLM's wheel is for glibc 2.28 or newer"
        raise EngineError(cause, "Run a container of Ubuntu 22.04 or newer: docs/gpus.md.")
    return f"{machine}, glibc {version}: vLLM's wheel wants 2.28"


def _compiler() -> str:
    """Triton builds its launchers with a C compiler, under torch.compile in trainer and server."""
    found = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if found is None:
        raise EngineError("no cc, gcc or clang: Triton compiles with one as it starts", "Run: sudo apt install gcc.")
    nvcc = shutil.which("nvcc") or "no nvcc, which FlashInfer's sampler alone would need"
    return f"{found}; {nvcc}; VLLM_USE_FLASHINFER_SAMPLER=0 is set"


def _shm(folder: Path = Path("/dev/shm")) -> str:
    free = free_disk_gb(folder)
    if free < _SHM_GB:
        cause = f"{free:.2f} GB are free in {folder}, where vLLM's processes share memory; a run wants {_SHM_GB:g}"
        raise EngineError(cause, f"Run: sudo mount -o remount,size=8G {folder}; a container: docker run --shm-size=8g.")
    return f"{free:.1f} GB free in {folder}"


def _files() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES:
        cause = f"a process may open {soft} files, and 512 answers are asked for at once"
        raise EngineError(cause, f"Run: ulimit -n {min(hard, 65_536) if hard > 0 else 65_536}; then this again.")
    return f"{soft} a process (ulimit -n)"


def _ports() -> str:
    ports = free_ports()
    return f"five in a row are free on the loopback, such as {ports.inference} to {ports.rendezvous}"


def _disk(root: Path, num_kept: int) -> str:
    free = free_disk_gb(root)
    run = RUN_DISK_GB + BROADCAST_GB * num_kept
    night = run + MODELS_GB  # and the models of kept experiments, of which no more are left
    if free < run:
        cause = f"{free:.1f} GB of disk are free for {root / 'runs'}, a run needs {run:g}"
        raise EngineError(cause, "Run: du -sh runs/*; then delete old ones.")
    few = "" if free >= night else ", and fewer are free: du -sh runs/* shows what can go"
    return f"{free:.1f} GB free; a run needs {run:g}, a night with its kept models {night:g}{few}"


def _wsl() -> str:
    if "microsoft" not in platform.release().lower():
        return ""
    return f"{os.uname().release}: VLLM_WSL2_ENABLE_PIN_MEMORY=1 is set; keep the checkout off /mnt/c"

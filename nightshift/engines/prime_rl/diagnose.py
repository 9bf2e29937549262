"""The cause of the death of a prime-rl process, in one line with a fix, from the end of its log.

Exit codes do not show the cause (1 for everything, 0 for a server whose engine died), and prime-rl writes no structured
cause. The patterns quote the sources in the comments (prime-rl 559b44772, vLLM 0.26.0, torch 2.11).
"""

import re
from collections.abc import Sequence
from itertools import takewhile

from nightshift.engines.base import NoGradient
from nightshift.errors import EngineError, Failure
from nightshift.text import clean

_OUT_OF_MEMORY = "OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
# torch's c10/cuda/CUDACachingAllocator.cpp lists every process on the GPU, those below 1 GiB in MiB.
_HOLDS = re.compile(r"[Pp]rocess(?: \d+)? has [\d.]+ GiB")
# Whole lines of pyzmq, torch's TCPStore, Python's sockets and uvicorn. Other exceptions may quote such words: a pool
# may be called EADDRINUSE, and a completion may contain anything.
_BIND = (
    r"^[\w-]+: (?:zmq\.error\.ZMQError: |torch\.distributed\.DistNetworkError: |OSError: \[Errno 98\] "
    r"|(?:ERROR: +)?\[Errno 98\] error while attempting to bind ).*[Aa]ddress already in use"
)
_EMPTY = "consecutive empty train batches"
# A pattern of `process: line`, the cause ({match} is the line), the fix, and the kind of failure. The first matching
# pattern decides.
_PATTERNS: tuple[tuple[str, str, str, Failure], ...] = (
    # vLLM v1/core/kv_cache_utils.py
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "no GPU memory is left for the KV cache",
        "Raise inference.vllm.gpu_memory_utilization, or lower inference.vllm.max_num_seqs.",
        Failure.CONFIG,
    ),
    (
        _OUT_OF_MEMORY,
        "out of GPU memory",
        "In the trainer, lower seq_len, or switch trainer.model.ac on; in inference, lower gpu_memory_utilization or "
        "max_num_seqs.",
        Failure.CONFIG,
    ),
    # P/orchestrator/orchestrator.py:640-652
    (
        _EMPTY,
        "ten batches in a row had no gradient: all rewards of every group were equal",
        "Raise orchestrator.group_size or the temperature, or undo the change that made the policy collapse.",
        Failure.CONFIG,
    ),
    (
        _BIND,
        "another process has taken a port of this run: {match}",
        "Run it again: it chooses new ports.",
        Failure.INFRASTRUCTURE,
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "Free space in runs/ (in a container also /dev/shm: docker run --shm-size=8g), then run it again.",
        Failure.INFRASTRUCTURE,
    ),
    # NCCL, torch, vLLM's platforms/cuda.py, and texts of the driver
    (
        r"NCCL error|torch\.distributed\.DistBackendError|Found no NVIDIA driver|Failed to infer device type"
        r"|no CUDA-capable device|No CUDA GPUs are available|uncorrectable ECC|No valid attention backend"
        r"|CUDA error: (?:unknown error|device-side|an illegal memory access)|no kernel image is available"
        r"|PTX was compiled with an unsupported toolchain|CUDA driver version is insufficient",
        "the GPU, its driver or NCCL failed: {match}",
        "Run: uv run nightshift doctor; then check the driver (nvidia-smi, docs/gpus.md).",
        Failure.INFRASTRUCTURE,
    ),
    # pydantic's text, also of vLLM's configs, and pydantic-config's (PC/cli.py:225-425)
    (
        r"validation errors? for \w+Config|Failed to validate config",
        "the config is refused: {match}",
        "Change that in train.toml, or undo the last change.",
        Failure.CONFIG,
    ),
)
# In torchrun's summary and in the log of vLLM's API server.
_KILLED = re.compile(r"Signal \d+ \(SIG\w+\) received|died unexpectedly|EngineDeadError")

# The prefixes of torchrun, and of the loggers of prime-rl and vLLM.
_FROM = r"(?:\[\w+\]:\s*|\(\w[^()]* pid=\d+\)\s*|[\d:]{8}\s+)*"
_PREFIX = re.compile(rf"^{_FROM}(?:(?:ERROR|CRITICAL)\s(?:[\d-]+ [\d:]+ \[[^\]]*\])?\s*)?")
# Lines that do not explain a death: news, which may quote the config, with names that an agent chose; warnings of
# loguru, Python and torch; the frames of a stack; reports of torchrun and vLLM that only refer to an earlier error.
_NOISE = re.compile(
    r"^(?:DEBUG|INFO|SUCCESS|WARNING)\b|\b\w*Warning:|^warnings\.warn\(|(?:^|[\[\]:\s])W\d{4} [\d:.]+ "
    r'|^Traceback|^File "|ChildFailedError|EngineDeadError|(?i:see (?:root cause|stack trace))'
)
_NEAR = 100  # lines; an earlier exception is not the cause
_EXCEPTION = re.compile(r"\b\w*(?:Error|Exception)(?::\s|$)")
# P/utils/utils.py:55 and 75: prime-rl's programs log their last exception like this, and exit later.
_FATAL = re.compile(rf"^{_FROM}ERROR Fatal error in \w+")


def diagnose(name: str, ending: str, log_lines: Sequence[str], *, is_shared: bool = False) -> EngineError:
    """Return an error with the cause of the death of process `name`: by a pattern, or its ending and last exception.

    Args:
        ending: how the process ended, such as `exit code 1`.
        log_lines: the end of the log, the oldest line first.
        is_shared: inference and trainer share a GPU, so two processes there belong to the run.
    """
    lines = [line for line in (_PREFIX.sub("", line) for line in log_lines) if not _NOISE.search(line)]
    for pattern, cause, fix, failure in _PATTERNS:
        for at, line in enumerate(lines):
            if re.search(pattern, f"{name}: {line}"):
                if pattern == _OUT_OF_MEMORY and len(_HOLDS.findall(line)) > 1 + is_shared:
                    cause = f"{cause}, which another process also uses"
                    fix, failure = "Free the GPU (nvidia-smi), then run it again.", Failure.INFRASTRUCTURE
                kind = NoGradient if pattern == _EMPTY else EngineError
                return kind(f"{name}: {cause.format(match=_message(lines[at:]))}", fix, failure=failure)
    if exceptions := [at for at in range(len(lines))[-_NEAR:] if _EXCEPTION.search(lines[at])]:
        return EngineError(f"{name} ended: {ending}: {_message(lines[exceptions[-1] :])}", failure=Failure.UNKNOWN)
    if "killed by" in ending or any(map(_KILLED.search, log_lines)):
        fix = "Check the kernel log (dmesg): perhaps the main memory was full. Then run it again."
        return EngineError(f"{name} ended: {ending}: a process was killed", fix)
    return EngineError(f"{name} ended: {ending}; its log does not say why")


def is_fatal(log_lines: Sequence[str]) -> bool:
    """Return whether a program of prime-rl logged the exception that ends the program."""
    return any(map(_FATAL.match, log_lines))


def no_step(seconds: float, num_rollouts: int) -> EngineError:
    """Return the error of a budget that ended without a step: a failure of the config, except without rollouts."""
    if not num_rollouts:
        fix = "Read env-server.log and inference.log in the run's folder, then run it again."
        return EngineError(f"no rollout was finished in {seconds:.0f} s", fix)
    cause = f"no step was finished in {seconds:.0f} s, but {num_rollouts} rollouts"
    fix = "Lower orchestrator.batch_size or max_completion_tokens; orchestrator.log shows groups with equal rewards."
    return EngineError(cause, fix, failure=Failure.CONFIG)


def _message(lines: Sequence[str]) -> str:
    """Return the first line, with up to two more lines of its message."""
    more = takewhile(lambda line: not re.match(r"E\d{4} ", line) and not _EXCEPTION.search(line), lines[1:3])
    return clean(" ".join([*lines[:1], *more]), 300)

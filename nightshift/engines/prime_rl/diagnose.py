"""The cause of the death of a prime-rl process, in one line with a fix, from the end of its log.

Exit codes do not show the cause (1 for everything, 0 for a server whose engine died), and prime-rl writes no structured
cause. This is the only module that reads log text, and it reads no numbers. The patterns quote the sources in the
comments (prime-rl 559b44772, vLLM 0.26.0, torch 2.11).
"""

import re
from collections.abc import Sequence
from itertools import takewhile

from nightshift.engines.base import NoGradient
from nightshift.errors import EngineError, Failure
from nightshift.text import clean

_OUT_OF_MEMORY = "OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
# Whole lines of pyzmq, torch's TCPStore, Python's sockets and uvicorn, after the process's name. Other exceptions may
# quote such words: a pool may be called EADDRINUSE, and a completion may contain anything.
_BIND = (
    r"^[\w-]+: (?:zmq\.error\.ZMQError: Address already in use(?: \(addr='tcp://[\w.*:]+'\))?$"
    r"|torch\.distributed\.DistNetworkError: The server socket has failed to listen\b.*\baddress already in use"
    r"|OSError: \[Errno 98\] Address already in use(?: \(while attempting to bind on address \(.*\)\))?$"
    r"|(?:ERROR: +)?\[Errno 98\] error while attempting to bind on address \('[\d.]+', \d+\): .*in use$)"
)
_EMPTY = r"consecutive empty train batches"
_HOLDS = r"[Pp]rocess(?: \d+)? has [\d.]+ GiB"
# A pattern of `process: line`, the cause ({match} is the line), the fix, and the kind of failure. The first matching
# pattern decides, so specific patterns come first.
_PATTERNS: tuple[tuple[str, str, str, Failure], ...] = (
    # vLLM v1/worker/gpu_worker.py and v1/core/kv_cache_utils.py
    (
        r"Free memory on device .* is less than desired GPU memory utilization",
        "the GPU has less free memory than gpu_memory_utilization: {match}",
        "Lower inference.vllm.gpu_memory_utilization, or free the GPU (nvidia-smi).",
        Failure.UNKNOWN,
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "no GPU memory is left for the KV cache",
        "Raise inference.vllm.gpu_memory_utilization, or lower inference.vllm.max_num_seqs.",
        Failure.CONFIG,
    ),
    # torch's c10/cuda/CUDACachingAllocator.cpp lists every process on the GPU, those below 1 GiB in MiB.
    (
        rf"(?:{_OUT_OF_MEMORY})(?:.*{_HOLDS}){{_FOREIGN}}",
        "out of GPU memory, which another process also uses: {match}",
        "Free the GPU (nvidia-smi), then run it again.",
        Failure.INFRASTRUCTURE,
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
    # P/orchestrator/train_sink.py:322-338
    (
        r"consecutive zero-output batch equivalents",
        "the rollouts of ten batches were all filtered: nothing to train on",
        "Relax the gates of the curriculum, or raise orchestrator.max_off_policy_steps.",
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
    (
        r"NCCL error|torch\.distributed\.DistBackendError",
        "NCCL failed: {match}",
        "Run it again; if it repeats, check the driver: uv run nightshift doctor.",
        Failure.INFRASTRUCTURE,
    ),
    (
        r"Found no NVIDIA driver|Failed to infer device type|no CUDA-capable device|No CUDA GPUs are available|"
        r"CUDA error: (?:unknown error|device-side|an illegal memory access)|uncorrectable ECC",
        "the GPU or its driver failed: {match}",
        "Run: uv run nightshift doctor; then check nvidia-smi (in a container: docker run --gpus all) and dmesg.",
        Failure.INFRASTRUCTURE,
    ),
    # Python's faulthandler
    (
        r"Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction)",
        "it crashed: {match}",
        "Run it again; if it repeats, look at the end of the log.",
        Failure.INFRASTRUCTURE,
    ),
    # torchrun's summary
    (
        r"Signal 9 \(SIGKILL\) received",
        "its worker was killed (SIGKILL), perhaps by the kernel for lack of main memory",
        "Check the kernel log (dmesg), then run it again.",
        Failure.INFRASTRUCTURE,
    ),
    # GPUs, drivers and systems that a package does not support; the second text is from vLLM's platforms/cuda.py.
    (
        r"no kernel image is available for execution|No valid attention backend",
        "a package has no kernel for this GPU: {match}",
        "Choose another GPU (--gpus), or VLLM_ATTENTION_BACKEND in [environment] of machine.toml (docs/gpus.md).",
        Failure.INFRASTRUCTURE,
    ),
    (
        r"PTX was compiled with an unsupported toolchain|CUDA driver version is insufficient",
        "the driver is too old: {match}",
        "Update the NVIDIA driver (docs/gpus.md), then run it again.",
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
_KILLED = "Check the kernel log (dmesg): perhaps the main memory was full. Then run it again."


# Lines below the cause that only refer to it: of torchrun, vLLM's executor, its engine and its API server.
_WRAPPER = re.compile(r"ChildFailedError|EngineDeadError|(?i:see (?:root cause|stack trace))|died unexpectedly")
# The prefixes of torchrun, and of the loggers of prime-rl and vLLM.
_FROM = r"(?:\[\w+\]:\s*|\(\w[^()]* pid=\d+\)\s*|[\d:]{8}\s+)*"
_PREFIX = re.compile(rf"^{_FROM}(?:(?:ERROR|CRITICAL)\s(?:[\d-]+ [\d:]+ \[[^\]]*\])?\s*)?")
# Warnings of loguru, Python and torch, which every healthy start logs.
_WARNING = re.compile(r"^WARNING\b|\b\w*Warning:|(?:^|[\[\]:\s])W\d{4} [\d:.]+ ")
_NEWS = re.compile(r"^(?:DEBUG|INFO|SUCCESS)\b")  # may quote the config, with names that an agent chose
# Lines that do not explain a death: news, frames of a stack, the code of a warning, vLLM's report of a dead engine.
_SILENT = re.compile(rf'{_NEWS.pattern}|^File "|^warnings\.warn\(|EngineDeadError')
_NEAR = 100  # lines; an earlier exception is not the cause
_PYDANTIC = re.compile(r"pydantic_core\._pydantic_core\.ValidationError: | Value error,|\s*\[type=\w+[],].*")
_EXCEPTION = re.compile(r"\b\w*(?:Error|Exception)(?::\s|$)")
# A line that does not continue the message of an exception.
_OTHER = re.compile(rf"{_NEWS.pattern}|^Traceback|^E\d{{4}} |{_EXCEPTION.pattern}|{_WRAPPER.pattern}")
# P/utils/utils.py:55 and 75: prime-rl's programs log their last exception like this, and exit later.
_FATAL = re.compile(rf"^{_FROM}ERROR Fatal error in \w+")


def diagnose(name: str, ending: str, log_lines: Sequence[str], *, is_shared: bool = False) -> EngineError:
    """Return an error with the cause of the death of process `name` and a fix.

    If no pattern matches, the cause is the ending and the last exception; without an exception, the failure counts as
    one of the infrastructure.

    Args:
        ending: how the process ended, such as `exit code 1`.
        log_lines: the end of the log, the oldest line first.
        is_shared: inference and trainer share a GPU, so two processes there belong to the run.
    """
    lines = [line for line in (_PREFIX.sub("", line) for line in log_lines) if not _WARNING.search(line)]
    foreign = "{3,}" if is_shared else "{2,}"
    for pattern, cause, fix, failure in _PATTERNS:
        regex = re.compile(pattern.replace("{_FOREIGN}", foreign))
        for at, line in enumerate(lines):
            if not _NEWS.match(line) and regex.search(f"{name}: {line}"):
                text = f"{name}: {cause.format(match=_message(lines[at:]))}"
                kind = NoGradient if pattern == _EMPTY else EngineError
                return kind(text, fix, failure=failure)
    end = next((at for at, line in enumerate(lines) if _WRAPPER.search(line)), len(lines))
    near = range(max(0, end - _NEAR), end)
    exceptions = [at for at in near if _EXCEPTION.search(lines[at]) and not _NEWS.match(lines[at])]
    if exceptions:
        return EngineError(f"{name} ended: {ending}: {_message(lines[exceptions[-1] : end])}", failure=Failure.UNKNOWN)
    is_killed = "SIGKILL" in ending or any(re.search("died unexpectedly|EngineDeadError", line) for line in lines)
    words = [line for line in lines[end : end + 1] or lines[-1:] if not _SILENT.search(line)]
    text = ": ".join([f"{name} ended: {ending}", *map(_clean, words)])
    return EngineError(text if words else f"{text}; its log does not say why", _KILLED if is_killed else "")


def is_fatal(log_lines: Sequence[str]) -> bool:
    """Return whether a program of prime-rl logged the exception that ends the program."""
    return any(map(_FATAL.match, log_lines))


def no_step(seconds: float, num_rollouts: int, batch_size: int | None) -> EngineError:
    """Return the error of a budget that ended without a step: a failure of the config, except without rollouts."""
    if not num_rollouts:
        fix = "Read env-server.log and inference.log in the run's folder, then run it again."
        return EngineError(f"no rollout was finished in {seconds:.0f} s", fix)
    fix = "Lower orchestrator.batch_size or max_completion_tokens."
    if batch_size is not None and num_rollouts >= batch_size:
        fix = (
            f"The rollouts fill a batch of {batch_size}: either all groups have equal rewards (orchestrator.log), or a "
        )
        fix += "step takes longer than the budget (trainer.log)."
    cause = f"no step was finished in {seconds:.0f} s, but {num_rollouts} rollouts"
    return EngineError(cause, fix, failure=Failure.CONFIG)


def _message(lines: Sequence[str]) -> str:
    """Return the first line, with up to two more lines of its message."""
    return _clean(" ".join([*lines[:1], *takewhile(lambda line: not _OTHER.search(line), lines[1:3])]))


def _clean(text: str) -> str:
    """Return a message without pydantic's module, type of error and input."""
    return clean(_PYDANTIC.sub("", text), 300)

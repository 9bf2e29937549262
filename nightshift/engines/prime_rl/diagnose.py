"""Why a prime-rl process died, as one line: what happened, on which side, and what to try next.

Exit codes say little (everything is 1, and 0 for a server whose engine died) and prime-rl writes no structured
cause, so this is the one place that reads log text; no number is taken from it. The patterns are quoted from the
sources named beside them (prime-rl 559b44772, vLLM 0.26.0, torch 2.11).
"""

import re
from collections.abc import Sequence
from itertools import takewhile

from nightshift.engines.base import NoGradient
from nightshift.errors import EngineError, Failure
from nightshift.text import clean

_OUT_OF_MEMORY = "OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
# Whole lines of pyzmq, of torch's TCPStore, of Python's and uvicorn's sockets, behind the process's name: an exception
# of another kind that quotes such words (a pool may be called EADDRINUSE, a completion may say anything) is none.
_BIND = (
    r"^[\w-]+: (?:zmq\.error\.ZMQError: Address already in use(?: \(addr='tcp://[\w.*:]+'\))?$"
    r"|torch\.distributed\.DistNetworkError: The server socket has failed to listen\b.*\baddress already in use"
    r"|OSError: \[Errno 98\] Address already in use(?: \(while attempting to bind on address \(.*\)\))?$"
    r"|(?:ERROR: +)?\[Errno 98\] error while attempting to bind on address \('[\d.]+', \d+\): .*in use$)"
)
_EMPTY = r"consecutive empty train batches"
_HOLDS = r"[Pp]rocess(?: \d+)? has [\d.]+ GiB"
# A pattern of `process: line`, the cause ({match} is the line), the fix, and whose fault it is. The first pattern
# that matches decides, so the specific ones stand first.
_PATTERNS: tuple[tuple[str, str, str, Failure], ...] = (
    # vLLM v1/worker/gpu_worker.py and v1/core/kv_cache_utils.py: the share asked for is not free, or too small.
    (
        r"Free memory on device .* is less than desired GPU memory utilization",
        "the GPU has less free memory than the share asked for: {match}",
        "Lower inference.vllm.gpu_memory_utilization, or free the GPU (nvidia-smi).",
        Failure.UNKNOWN,
    ),
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "no GPU memory is left for the KV cache",
        "Raise inference.vllm.gpu_memory_utilization, or lower inference.vllm.max_num_seqs.",
        Failure.CONFIG,
    ),
    # torch's c10/cuda/CUDACachingAllocator.cpp names every process on the GPU; in a container its own by a number, too.
    # Below 1 GiB (a desktop's) it writes MiB.
    (
        rf"(?:{_OUT_OF_MEMORY})(?:.*{_HOLDS}){{_FOREIGN}}",
        "out of GPU memory beside another process: {match}",
        "Free the GPU (nvidia-smi), then run it again.",
        Failure.INFRASTRUCTURE,
    ),
    # torch.OutOfMemoryError and its older spelling; NCCL and cuBLAS report the same in other words.
    (
        rf"^inference: .*(?:{_OUT_OF_MEMORY})",
        "out of GPU memory",
        "Lower inference.vllm.gpu_memory_utilization or inference.vllm.max_num_seqs.",
        Failure.CONFIG,
    ),
    (_OUT_OF_MEMORY, "out of GPU memory", "Lower seq_len, or switch trainer.model.ac on.", Failure.CONFIG),
    # P/orchestrator/orchestrator.py:640-652
    (
        _EMPTY,
        "ten batches in a row had no advantage: all rewards of every group were equal",
        "Raise orchestrator.group_size or the temperature, or undo what made the policy collapse.",
        Failure.CONFIG,
    ),
    # P/orchestrator/train_sink.py:322-338
    (
        r"consecutive zero-output batch equivalents",
        "ten batches' worth of rollouts gave nothing to train on",
        "Loosen the curriculum's gates, or raise orchestrator.max_off_policy_steps.",
        Failure.CONFIG,
    ),
    (
        _BIND,
        "a port was taken by another process between its choice and its use: {match}",
        "Run it again: ports are chosen anew.",
        Failure.INFRASTRUCTURE,
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full",
        "Free space where runs/ lies, then run it again.",
        Failure.INFRASTRUCTURE,
    ),
    # torch.distributed and the driver
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
        "See nvidia-smi (a container: docker run --gpus all) and the kernel log, then: uv run nightshift doctor.",
        Failure.INFRASTRUCTURE,
    ),
    # Python's faulthandler
    (
        r"Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction)",
        "it crashed: {match}",
        "Run it again; if it repeats, look at the end of the log.",
        Failure.INFRASTRUCTURE,
    ),
    # torchrun's summary of a worker that somebody else killed
    (
        r"Signal 9 \(SIGKILL\) received",
        "its worker was killed (SIGKILL), perhaps by the kernel for lack of main memory",
        "See the kernel log (dmesg), then run it again.",
        Failure.INFRASTRUCTURE,
    ),
    # What cards, drivers and systems print that a wheel was not built for: no config causes these. The second is of
    # vLLM's platforms/cuda.py.
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
    (
        r"version `GLIBC_[\d.]+' not found",
        "the system's glibc is too old for a package: {match}",
        "Use a newer Linux, or a container of one (docs/gpus.md).",
        Failure.INFRASTRUCTURE,
    ),
    (
        r"UVA is not available",
        "the driver has no unified addressing (UVA)",
        "WSL2: run wsl --update in Windows; a virtual machine: pass the whole GPU through.",
        Failure.INFRASTRUCTURE,
    ),
    (
        r"Python\.h: No such file",
        "Triton cannot compile: Python's headers are missing",
        "Run: sudo apt install python3-dev; or repair the installation: uv run prepare.py.",
        Failure.INFRASTRUCTURE,
    ),
    # P/trainer/model.py:1321-1324
    (
        r"Flash attention \d is only supported if|No module named 'flash_attn",
        "the attention kernel is not installed: {match}",
        "Repair the installation: uv run prepare.py.",
        Failure.INFRASTRUCTURE,
    ),
    # pydantic's own text, also of vLLM's configs; pydantic-config's box around a refused config (PC/cli.py:225-425)
    (
        r"validation errors? for \w+Config|Failed to validate config",
        "the config is refused: {match}",
        "Change that in train.toml, or undo the last change.",
        Failure.CONFIG,
    ),
)
_KILLED = "See the kernel log (dmesg): perhaps the main memory was full. Then run it again."


# They stand below the cause and only point back to it: torchrun, vLLM's executor, its engine, its API server.
_WRAPPER = re.compile(r"ChildFailedError|EngineDeadError|(?i:see (?:root cause|stack trace))|died unexpectedly")
# What torchrun, vLLM, prime-rl's and vLLM's loggers put before a line.
_FROM = r"(?:\[\w+\]:\s*|\(\w[^()]* pid=\d+\)\s*|[\d:]{8}\s+)*"
_PREFIX = re.compile(rf"^{_FROM}(?:(?:ERROR|CRITICAL)\s(?:[\d-]+ [\d:]+ \[[^\]]*\])?\s*)?")
# Every healthy start has some: of loguru, of Python, of torch; prime-rl's while it waits for the server, for one.
_WARNING = re.compile(r"^WARNING\b|\b\w*Warning:|(?:^|[\[\]:\s])W\d{4} [\d:.]+ ")
_NEWS = re.compile(r"^(?:DEBUG|INFO|SUCCESS)\b")  # quotes the config, so a name that the agent chose
# Tells nothing of a death: news, a frame of a stack, the code of a warning, vLLM's word for an engine that is gone.
_SILENT = re.compile(rf'{_NEWS.pattern}|^File "|^warnings\.warn\(|EngineDeadError')
_NEAR = 100  # lines above: an exception further up did not end it
_PYDANTIC = re.compile(r"pydantic_core\._pydantic_core\.ValidationError: | Value error,|\s*\[type=\w+[],].*")
_EXCEPTION = re.compile(r"\b\w*(?:Error|Exception)(?::\s|$)")
# A line that does not belong to the message of the exception above it: of a logger, a traceback, another exception.
_OTHER = re.compile(rf"{_NEWS.pattern}|^Traceback|^E\d{{4}} |{_EXCEPTION.pattern}|{_WRAPPER.pattern}")
# P/utils/utils.py:55 and 75: how each of prime-rl's programs logs the exception that ends it. The exit comes later.
_FATAL = re.compile(rf"^{_FROM}ERROR Fatal error in \w+")


def diagnose(name: str, ending: str, log_lines: Sequence[str], *, is_shared: bool = False) -> EngineError:
    """The cause of the death of process `name`, from the end of its log (plain lines, oldest first), and what to try.

    `is_shared`: inference and trainer are on one GPU, so two processes there are our own.

    If no pattern matches: how the process ended, and the last exception above those that only point to it.
    Its failure is then unknown if the log has an exception, else of the infrastructure.
    """
    lines = [line for line in (_PREFIX.sub("", line) for line in log_lines) if not _WARNING.search(line)]
    foreign = "{3,}" if is_shared else "{2,}"
    for pattern, cause, fix, failure in _PATTERNS:
        wanted = re.compile(pattern.replace("{_FOREIGN}", foreign))
        for at, line in enumerate(lines):
            if not _NEWS.match(line) and wanted.search(f"{name}: {line}"):
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
    """Return True if a program of prime-rl logged the exception that ends it. Exceptions that prime-rl survives, as of
    one rollout, are logged in other words."""
    return any(map(_FATAL.match, log_lines))


def no_step(seconds: float, num_rollouts: int, batch_size: int | None) -> EngineError:
    """Why a budget ended without a step: too few rollouts are the config's doing, none at all are not."""
    if not num_rollouts:
        fix = "See env-server.log and inference.log in the run's folder, then run it again."
        return EngineError(f"not one rollout was finished in {seconds:.0f} s", fix)
    fix = "Lower orchestrator.batch_size or max_completion_tokens."
    if batch_size is not None and num_rollouts >= batch_size:
        fix = f"They fill a batch of {batch_size}: groups with equal rewards do not train (orchestrator.log), "
        fix += "or a step takes longer (trainer.log)."
    cause = f"no step was finished in {seconds:.0f} s, of {num_rollouts} rollouts"
    return EngineError(cause, fix, failure=Failure.CONFIG)


def _message(lines: Sequence[str]) -> str:
    """Return the first line with the next two, as far as they belong to its message."""
    return _clean(" ".join([*lines[:1], *takewhile(lambda line: not _OTHER.search(line), lines[1:3])]))


def _clean(text: str) -> str:
    """Return a message without what pydantic adds to it: its own module, the kind of the error, all of the input."""
    return clean(_PYDANTIC.sub("", text), 300)

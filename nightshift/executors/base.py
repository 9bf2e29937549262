"""Where runs are made. An executor starts workers in its slots; the run's folder holds what goes in and comes back.

runs/NNNN/job.json         what the worker needs
runs/NNNN/submitted.json   the worker's name and its public key, written before it is started
runs/NNNN/                 what the worker leaves: metrics, answers, weights, logs, and last its result, signed

A worker signs its result with a private key that reaches it by another way than the folder, so whoever can write there
forges none. By its name and its public key a later head finds and believes a worker that outlived an earlier one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from nightshift.campaign.ledger import SUBMITTED_NAME
from nightshift.campaign.records import JOB_NAME, RESULT_NAME, Job, Result, Signed, signed_bytes
from nightshift.errors import EngineError
from nightshift.executors.slots import Slot
from nightshift.files import read_file, write_json


@dataclass(frozen=True, slots=True)
class Submitted:
    """`submitted.json`: how a worker is found, what its result is verified with, and which job.json it was given."""

    name: str
    executor: str
    public_key: str  # hex, as the next
    job_sha256: str


class Executor(Protocol):
    """`local`: workers on this machine; `slurm`: jobs of a cluster."""

    look_key: bytes  # that sealed runs are opened with; empty but for the head of a look

    @property
    def num_slots(self) -> int:
        """How many runs can be in flight."""
        ...

    @property
    def free_slots(self) -> Sequence[Slot]:
        """The places on this machine that the next runs take, in their order; none of a cluster."""
        ...

    def hardware(self, of_engine: str) -> str:
        """What its runs have, where the engine has this; empty where their results tell it."""
        ...

    def submit(self, folder: Path, job: Job, enter: Callable[[], None]) -> None:
        """Write job.json and submitted.json into `folder`, have the latter entered in the chain, and only then start
        the worker of that run: a later head finds whatever was started. EngineError where none can be started."""
        ...

    def adopt(self, folder: Path, was: Submitted, job: Job) -> bool:
        """Take over a run that an earlier head submitted; False where nothing will come of it."""
        ...

    def is_over(self, folder: Path) -> bool:
        """True if nothing more will come of the run."""
        ...

    def wait(self, timeout_seconds: float) -> None:
        """Return when a run in flight ends, at the latest after `timeout_seconds`."""
        ...

    def in_flight(self) -> dict[Path, Job]:
        """The runs that were submitted and not collected, by their folders."""
        ...

    def has_begun(self, folder: Path) -> bool:
        """Whether a run in flight is more than a job that waits."""
        ...

    def other_jobs(self) -> list[str]:
        """Jobs of this person that it did not submit, `17 name`: of a cluster that answers."""
        ...

    def cancel(self, folders: Collection[Path]) -> None:
        """End the workers of these runs and all that they started; nothing where one was collected. Never fails."""
        ...

    def result(self, folder: Path) -> Result:
        """What came back of a run that is over. EngineError where that cannot be relied on, or where nothing did."""
        ...


def announce(folder: Path, job: Job, name: str, executor: str) -> tuple[bytes, Submitted]:
    """Write what a worker needs, and by what it is found: its private key, which nobody else gets, and the latter."""
    key = Ed25519PrivateKey.generate()
    data = write_json(folder / JOB_NAME, job)
    public_key = key.public_key().public_bytes_raw().hex()
    told = Submitted(name, executor, public_key, hashlib.sha256(data).hexdigest())
    write_json(folder / SUBMITTED_NAME, told)
    return key.private_bytes_raw(), told


def job_of(folder: Path, was: Submitted) -> Job | None:
    """The job that a worker was given; None where another one lies there now, or none that can be read."""
    try:
        data = read_file(folder / JOB_NAME)
        is_it = hashlib.sha256(data).hexdigest() == was.job_sha256
        return msgspec.json.decode(data, type=Job) if is_it else None
    except (OSError, ValueError):
        return None


def verified(folder: Path, job: Job, public_key: str) -> Result:
    """The result of a run, which its worker signed.

    FileNotFoundError where there is none; EngineError where what lies there is not what that worker made of this job.
    """
    path = folder / RESULT_NAME
    try:
        signed = msgspec.json.decode(read_file(path), type=Signed)
        result = msgspec.json.decode(signed.result, type=Result)
        _ = result.evaluation and result.evaluation.example_scores
        key, signature = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)), bytes.fromhex(signed.signature)
        key.verify(signature, signed_bytes(bytes(signed.result), job))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    except InvalidSignature:
        raise EngineError(f"{path} was not signed by the worker that was started: it counts for nothing") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise EngineError(f"{path} is no result of a worker: {error}") from None
    return result

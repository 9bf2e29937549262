"""What comes back of a run: runs/NNNN/result.json, which a worker leaves last, with the token of its job."""

from pathlib import Path

from nightshift.campaign.records import RESULT_NAME, Job, Result
from nightshift.errors import EngineError
from nightshift.files import parse_json, read_file


def read_result(folder: Path, job: Job) -> Result:
    """Read the result of a run.

    Raises: FileNotFoundError where there is none; EngineError, which names the file, where it cannot be read or is of
    another job.
    """
    path = folder / RESULT_NAME
    try:
        result = parse_json(read_file(path), Result)
        _ = result.evaluation and result.evaluation.example_scores
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise EngineError(f"{path} is no result of a worker: {error}") from None
    for what, found, wanted in (
        ("token", result.token, job.token),
        ("seed", result.seed, job.seed),
        ("job.json with the sha256", result.job_sha256, job.sha256),
    ):
        if found != wanted:
            raise EngineError(f"{path} has the {what} {found!r}, its job has {wanted!r}: it counts for nothing")
    return result

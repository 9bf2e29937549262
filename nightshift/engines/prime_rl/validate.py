"""Validate the config of a run with prime-rl's classes, and write the configs of prime-rl's programs.

    python -P validate.py TREE CONFIGS VERDICT

This script runs in prime-rl's environment and imports nothing of Nightshift. TREE is the RLConfig as JSON. CONFIGS is
the folder for the configs, as prime-rl's launcher writes them (write_subconfigs, src/prime_rl/entrypoints/rl.py:77;
`rl --dry-run` would delete rollouts and broadcasts). VERDICT gets one line of JSON:

    {"errors": [{"loc": [...], "message": "...", "input": ...}]}
"""

import inspect
import json
import re
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any


class LossError(ImportError):
    """The code of a loss cannot be imported, which is a failure of the config."""


def main(tree: Path, configs_dir: Path, verdict: Path) -> int:
    """Write the configs and the verdict. Returns the exit code, 0 for a valid config."""
    errors = []
    try:
        write_configs(json.loads(tree.read_bytes()), configs_dir)
    except Exception as error:  # modules that the config names may raise any exception
        errors = errors_of(error)
    verdict.write_text(json.dumps({"errors": errors}) + "\n")
    return len(errors) > 0


def write_configs(tree: dict[str, Any], configs_dir: Path) -> None:
    """Resolve the tree and write the configs of inference server, trainer, orchestrator and env servers."""
    from prime_rl.configs.rl import RLConfig  # type: ignore[import-not-found]
    from prime_rl.utils.config import dump_resolved_config as dump  # type: ignore[import-not-found]

    config = RLConfig.model_validate(tree)
    if config.trainer.loss.type == "custom":
        import_loss(config.trainer.loss.import_path, config.trainer.loss.kwargs)
    files = {
        "inference.json": dump(config.inference, exclude={"deployment", "slurm", "output_dir", "dry_run"}),
        "trainer.json": dump(config.trainer),
        "orchestrator.json": dump(config.orchestrator),
    }
    addresses = config.orchestrator.env_addresses
    for split, source in config.orchestrator.env_sources:
        name, values = source.resolved_name, dump(source)
        files[f"envs/{split}/{name}.json"] = {
            "env": values["env"],
            "serve": {**values["serve"], "address": addresses[split, name]},
            "log": {"level": config.orchestrator.log.vf_level, "json_logging": config.orchestrator.log.json_logging},
        }
    for name, content in files.items():
        path = configs_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2))


def import_loss(import_path: str, kwargs: dict[str, Any]) -> None:
    """Import a loss as the trainer does (src/prime_rl/utils/utils.py:34), and check its parameters. LossError."""
    module, _, name = import_path.rpartition(".")
    try:
        inspect.signature(getattr(import_module(module), name)).bind(None, **kwargs)
    except (Exception, SystemExit) as error:
        text, package = "".join(traceback.format_exception(error)), module.partition(".")[0]
        places = re.findall(rf'File "(?:.*/)?({package}/.*)", line (\d+)', text)
        place = f"{':'.join(places[-1])}: " if places else ""
        raise LossError(f"the loss {import_path} of rules.toml: {place}{type(error).__name__}: {error}") from error


def errors_of(error: Exception) -> list[dict[str, Any]]:
    """Return the errors of a failed validation, or another exception as one error."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        loc = ["trainer", "loss", "type"] if isinstance(error, LossError) else []
        return [{"loc": loc, "message": str(error), "input": None}]
    return [
        {
            "loc": entry["loc"],
            "message": entry["msg"],
            "input": entry["input"]
            if isinstance(entry["input"], bool | int | float | str)
            else None,  # no table or list
        }
        for entry in error.errors(include_url=False)
    ]


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))

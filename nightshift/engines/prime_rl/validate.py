"""Has prime-rl's own classes check a run's config, and writes the files that prime-rl's programs read.

    python -P validate.py TREE CONFIGS VERDICT

in prime-rl's own environment; imports nothing of Nightshift. TREE is the RLConfig as JSON. CONFIGS is the
folder that holds inference.json, with which the server is being started meanwhile, and that gets the other
files, as prime-rl's launcher writes them (src/prime_rl/entrypoints/rl.py:77, write_subconfigs). VERDICT gets
one line of JSON, which is printed too:

    {"ok": true, "inference": the server's resolved config}
    {"ok": false, "errors": [{"loc": [...], "message": "...", "input": ..., "type": "..."}]}
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAUNCHER_ONLY = {"deployment", "slurm", "output_dir", "dry_run"}
MISMATCH = "mismatch"  # the `type` of an error that only this file can find


def main(tree: Path, configs_dir: Path, verdict: Path) -> int:
    """Exit code 0 for a valid config, 1 for any other; VERDICT says why."""
    try:
        answer = validate(json.loads(tree.read_bytes()), configs_dir)
    except Exception as error:  # whatever a module that an id names may raise, too: all of it is the answer
        answer = {"ok": False, "errors": errors_of(error)}
    line = json.dumps(answer)
    temporary = verdict.with_name(f".{verdict.name}.{os.getpid()}")
    temporary.write_text(line + "\n")
    temporary.replace(verdict)
    print(line)
    return 0 if answer["ok"] else 1


def validate(tree: dict[str, Any], configs_dir: Path) -> dict[str, Any]:
    """Resolve the tree, write the configs of trainer, orchestrator and env servers, compare that of the server."""
    from prime_rl.configs.inference import InferenceConfig  # type: ignore[import-not-found]
    from prime_rl.configs.rl import RLConfig  # type: ignore[import-not-found]
    from prime_rl.utils.config import dump_resolved_config as dump  # type: ignore[import-not-found]

    config = RLConfig.model_validate(tree)
    # Both as the server itself will read them: it rounds up the rank of adapters, for one.
    resolved = dump(InferenceConfig.model_validate(dump(config.inference, LAUNCHER_ONLY)), LAUNCHER_ONLY)
    started = json.loads((configs_dir / "inference.json").read_bytes())
    started = dump(InferenceConfig.model_validate(started), LAUNCHER_ONLY)
    differences = list(differing(started, resolved, ("inference",)))
    if differences:
        return {"ok": False, "errors": differences}
    files = {"trainer.json": dump(config.trainer), "orchestrator.json": dump(config.orchestrator)}
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
    return {"ok": True, "inference": resolved}


def differing(started: Any, resolved: Any, path: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """One error for every key in which the server's config is not what prime-rl makes of the whole."""
    if isinstance(started, dict) and isinstance(resolved, dict):
        for key in sorted({*started, *resolved}):
            yield from differing(started.get(key), resolved.get(key), (*path, key))
    elif started != resolved:
        message = f"the server was started with {started!r}, prime-rl resolves {resolved!r}"
        yield {"loc": list(path), "message": message, "input": _plain(started), "type": MISMATCH}


def errors_of(error: Exception) -> list[dict[str, Any]]:
    """All errors of a failed validation; any other exception is one error with its type."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return [{"loc": [], "message": str(error), "input": None, "type": type(error).__name__}]
    return [
        {"loc": list(entry["loc"]), "message": entry["msg"], "input": _plain(entry["input"]), "type": entry["type"]}
        for entry in error.errors(include_url=False, include_context=False)
    ]


def _plain(value: Any) -> Any:
    """A single value; None for tables and lists, which stand in TREE."""
    return value if isinstance(value, bool | int | float | str) else None


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))

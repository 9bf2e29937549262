"""`nightshift export --to rl.toml`: what an experiment trained with on prime-rl, as a config that prime-rl itself runs.

The values are those that the engine composes for a run: train.toml, and what the rules and the engine fix.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nightshift.engines.downloads import model_folder
from nightshift.engines.prime_rl.config import with_seed
from nightshift.engines.prime_rl.engine import PrimeRlEngine
from nightshift.engines.prime_rl.install import ENGINE
from nightshift.errors import UsageError
from nightshift.report.data import Story
from nightshift.text import clean


def as_rl_toml(story: Story, number: int | None, root: Path, environ: Mapping[str, str]) -> bytes:
    """Return the config of an experiment, of the incumbent if `number` is None; comments say how to run it.

    Raises:
        UsageError: there is no such experiment, prime-rl did not train it, or the checkout's code is another by now.
    """
    configs = story.campaign.configs
    config = story.configs.get(number) if number is not None else configs and configs[1]
    name = "the incumbent" if number is None else f"experiment {number:04d}"
    if config is None:
        raise UsageError(f"{name} has no train.toml", "Run the baseline, or name another --experiment.")
    rules = next(filter(None, map(story.rules, reversed(story.records))), None)
    if rules is None:
        raise UsageError("the rules of the campaign are gone: no job.json in runs/ is whole", "Restore runs/.")
    if rules.engine != ENGINE:
        cause = f"{name} was trained by the engine {rules.engine}, and no config of prime-rl trains the same"
        raise UsageError(cause, "Measure it with prime-rl first: uv run run.py --engine prime-rl, on a new branch.")
    if rules.hash(root) != story.rules_hash:
        cause = f"{name} was measured under other rules ({story.rules_hash}) than the files here make"
        raise UsageError(cause, f"Check out the campaign: git switch {story.branch}.")
    run = next((r for r in story.records if r.number == number), story.campaign.incumbent_run)
    result = run.result if run else None
    engine = PrimeRlEngine(rules, root, environ)
    environments = engine.installation.environments_dir(root, rules).relative_to(engine.installation.root)
    model = shlex.quote(str(model_folder(rules, root)))
    head = [
        f"{name} of {story.branch}, for prime-rl {engine.installation.pins.commit}",
        f"model {rules.model}{f', revision {rules.model_revision}' if rules.model_revision else ''}",
        f"trained: {f'{result.training.num_steps} steps in ' if result else ''}a budget of {rules.budget_text}; "
        "prime-rl trains until max_steps, without an end if it is None",
        "run it in the prime-rl checkout that prepare.py filled:",
        f"  HF_HUB_OFFLINE=1 PYTHONPATH=$PWD/{environments} uv run --no-sync rl @ THIS_FILE --model.name {model}",
    ]
    if rules.learning_rate_scale != 1:
        head.append(f"learning rates are those of train.toml times {rules.learning_rate_scale:g}")
    if rules.memory.startswith("1 x"):
        head.append("measured with server and trainer on one GPU; prime-rl's launcher wants two")
    return rl_toml(engine.validate(config).settings, result.seed if result else rules.seed(0), head)


def rl_toml(settings: Mapping[str, Any], seed: int, head: list[str]) -> bytes:
    """Return settings of the engine prime-rl, with a run's seed, as TOML below the comment `head`."""
    import tomlkit

    tree = with_seed(settings, seed)
    # What Nightshift sets to supervise a run, and prime-rl's own launcher chooses by itself.
    del tree["clean"], tree["rollout_transport"], tree["inference"]["server"]
    del tree["trainer"]["monitors"], tree["orchestrator"]["monitors"]
    comment = "\n".join(f"# {clean(line)}" for line in head)
    return f"{comment}\n\n{tomlkit.dumps(_without_null(tree))}".encode()


def _without_null(node: Any) -> Any:
    """Return the same tables with "None", prime-rl's word in TOML, in place of null."""
    if isinstance(node, list):
        return [_without_null(item) for item in node]
    if isinstance(node, dict):
        return {name: _without_null(value) for name, value in node.items()}
    return "None" if node is None else node

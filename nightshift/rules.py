"""What all experiments of a campaign share: frozen constants and the bytes of the code that measures.

Two results compare only if they carry the same rules hash. Nothing in train.toml can change a value
here; a value here that train.toml also names is a locked key (see keys.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nightshift.errors import UsageError
from nightshift.records import DecisionRules, Decoding

# The code that turns a policy into a number and a number into a verdict.
MEASURING_CODE = (
    "environments/**/*.py",
    "nightshift/evaluation.py",
    "nightshift/campaign/decision.py",
)


@dataclass(frozen=True, slots=True)
class EnvironmentRules:
    """One environment: the package that holds `data` and `scoring`, and the sizes of its sets."""

    package: str
    num_selection: int
    num_train: int | None = None  # None: the whole train split


@dataclass(frozen=True, slots=True)
class Rules:
    """One set-up. `deadline_seconds` is the hard stop of one run, start-up and evaluation included."""

    name: str
    engine: str
    model: str
    model_revision: str | None  # None: the model's bytes lie in this repository and are hashed
    environments: tuple[EnvironmentRules, ...]
    budget_seconds: float
    startup_seconds: float
    evaluation_seconds: float
    decoding: Decoding
    decision: DecisionRules
    max_completion_tokens: int  # cap on training rollouts: the model's context allows no more
    learning_rate_scale: float = 1.0
    first_seed: int = 1000

    def __post_init__(self) -> None:
        if len({environment.num_selection for environment in self.environments}) != 1:
            # eval_score is the mean over environments; the paired decision averages over examples.
            raise ValueError(f"rules {self.name}: all environments need selection sets of one size")

    @property
    def deadline_seconds(self) -> float:
        """Hard stop of one run: reaching it is a crash."""
        return self.startup_seconds + self.budget_seconds + self.evaluation_seconds

    def seed(self, index: int) -> int:
        """Seed of the index-th run of a config, the same for every config (common random numbers)."""
        return self.first_seed + index

    def with_budget(self, budget_seconds: float) -> Rules:
        """The same rules under another budget: another hash, so a campaign of its own."""
        if not 1 <= budget_seconds <= 86_400:
            raise UsageError(f"--budget-seconds {budget_seconds:g} is out of range", "Give 1 to 86400 seconds.")
        return replace(self, budget_seconds=float(budget_seconds))

    def hash(self, root: Path) -> str:
        """12 hex digits over the constants, the measuring code below `root`, and a shipped model."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        files = [file for name in MEASURING_CODE for file in sorted(root.glob(name))]
        if self.model_revision is None:
            files += sorted(file for file in (root / self.model).iterdir() if file.suffix != ".md")
        for file in files:
            data = file.read_bytes()
            digest.update(f"{file.relative_to(root).as_posix()}\0{len(data)}\0".encode() + data)
        return digest.hexdigest()[:12]


_QWEN = ("Qwen/Qwen2.5-0.5B-Instruct", "7ae557604adf67be50417f59c2c2f167def9a775")
_GSM8K = (EnvironmentRules("nightshift_gsm8k", num_selection=1319),)

GSM8K_PRIME_RL = Rules(
    name="gsm8k-prime-rl",
    engine="prime-rl",
    model=_QWEN[0],
    model_revision=_QWEN[1],
    environments=_GSM8K,
    budget_seconds=600.0,
    startup_seconds=300.0,
    evaluation_seconds=300.0,
    decoding=Decoding(max_completion_tokens=1024),
    decision=DecisionRules(),
    max_completion_tokens=2048,
)

GSM8K_TRL = replace(
    GSM8K_PRIME_RL,
    name="gsm8k-trl",
    engine="trl",
    evaluation_seconds=600.0,  # transformers completes more slowly than vLLM
    decoding=Decoding(max_completion_tokens=1024, batch_size=128),
)

ARITHMETIC_TRL = Rules(
    name="arithmetic-trl",
    engine="trl",
    model="models/arithmetic-base",
    model_revision=None,
    environments=(EnvironmentRules("nightshift_arithmetic", num_selection=1000, num_train=4000),),
    budget_seconds=60.0,
    startup_seconds=120.0,
    evaluation_seconds=120.0,
    decoding=Decoding(max_completion_tokens=64),
    # Measured with benchmarks/arithmetic_slope.py: one-key changes move the score by -0.14 to +0.08, eight times
    # GSM8K's spread, and so are means and `take_back`. Runs of one config differ by 0.012 on a quiet
    # machine, and by more on one that is shared, because fewer steps fit into the minute.
    decision=DecisionRules(prior_sd=0.08, seed_sd=0.02, take_back=0.008),
    max_completion_tokens=64,
    learning_rate_scale=50.0,
)

ALL_RULES = (GSM8K_PRIME_RL, GSM8K_TRL, ARITHMETIC_TRL)


def rules_named(name: str) -> Rules:
    """The rules of that name. UsageError where this version has none."""
    for rules in ALL_RULES:
        if rules.name == name:
            return rules
    raise UsageError(f"rules {name!r} are unknown to this version", "Use the version that wrote them.")

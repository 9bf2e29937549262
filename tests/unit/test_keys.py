"""The allow-list against a recording of prime-rl's config classes: it can neither drift nor leave a gap."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nightshift.config import allowlist
from nightshift.config.allowlist import (
    CURRICULUM,
    KEYS,
    OPPONENT,
    PARAMETERS,
    SOURCE,
    Key,
    Kind,
    accept,
    find_key,
    lock,
)
from nightshift.errors import ConfigError

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "rlconfig-keys.json").read_text()
)
# prime-rl hands these to vLLM untouched, so its classes do not name them.
PASS_THROUGH = {"inference.vllm.max_num_seqs", "inference.vllm.max_num_batched_tokens"}
MAPPINGS = (
    f"{CURRICULUM}.sampler.pools.",
    f"{CURRICULUM}.gates.",
    f"{PARAMETERS}.",
)  # the recording stops at their names
# Defaults that prime-rl fills in after its classes: resolve_batching, and each side's own seq_len.
# And the one that is Nightshift's own (prime_rl/config.py): it follows from the batch.
LATE_DEFAULTS = {
    "orchestrator.batch_size": 128,
    "seq_len": RECORDED["orchestrator.seq_len"]["default"],
    "orchestrator.concurrency.max_inflight": None,
}


def open_variants(selector: str) -> tuple[str, ...]:
    [key] = [key for key in KEYS if key.path == selector]
    return key.choices


def wanted_variants(key: Key, selector: str) -> tuple[Any, ...]:
    """The variants under which a key exists, by its own condition or that of a table around it."""
    for entry in (key, *(entry for entry in KEYS if key.path.startswith(f"{entry.path}."))):
        if entry.only_if and entry.only_if[0] == selector:
            return entry.only_if[1]
    return open_variants(selector)


def recorded_names(key: Key) -> list[str]:
    """The names under which the recording knows an open key: one for every variant it exists in."""
    if key.table == allowlist.RATIO:  # by environment here, in each source there
        return [f"{SOURCE}[].ratio"]
    names = [""]
    own: list[str] = []
    for segment in key.path.split("."):
        grown = []
        for name in names:
            variants = RECORDED.get(name, {}).get("variants")
            if variants and segment != "type":
                wanted = wanted_variants(key, f"{'.'.join(own)}.type")
                grown += [f"{name}<{variant}>.{segment}" for variant in wanted]
            else:
                grown.append(f"{name}.{segment}" if name else segment)
        names = [f"{name}[]" if name == SOURCE else name for name in grown]
        own.append(segment)
    return names


# OPPONENT is ours: prime-rl has no such thing.
CHECKED = [k for k in KEYS if k.path not in PASS_THROUGH and not k.path.startswith(MAPPINGS) and k.table != OPPONENT]


@pytest.mark.parametrize("key", CHECKED, ids=lambda key: key.path)
def test_default_is_that_of_prime_rl(key: Key) -> None:
    for name in recorded_names(key):
        if key.path in LATE_DEFAULTS:
            assert key.default == LATE_DEFAULTS[key.path]
        elif key.kind is Kind.TABLE:
            # The recording has no default for a table that is on: it comes from a factory.
            assert (key.default is None) == ("default" in RECORDED[name])
        elif key.kind is Kind.LIST:
            assert isinstance(key.default, tuple)
            assert set(key.default) <= set(RECORDED[name]["default"])
        elif name in RECORDED:
            variant = re.search(r"<(\w+)>[^<]*$", name)
            default = key.default_for.get(variant[1], key.default) if variant else key.default
            assert default == RECORDED[name]["default"]
            assert isinstance(default, type(RECORDED[name]["default"]))


def test_a_variant_key_exists_in_no_other_variant() -> None:
    # Else the same value would be refused under a type for which prime-rl takes it.
    for key in CHECKED:
        if key.only_if is None or not key.only_if[0].endswith(".type"):
            continue
        table = key.only_if[0].removesuffix(".type")
        others = {*open_variants(key.only_if[0])} - {*key.only_if[1]}
        assert [variant for variant in others if f"{table}<{variant}>.{key.leaf}" in RECORDED] == []


def test_every_prime_rl_key_is_open_or_has_an_owner() -> None:
    def owner(path: tuple[str, ...]) -> allowlist.Lock | None:
        return lock(path) or (lock(path, allowlist.FOREIGN) if path[:3] == tuple(SOURCE.split(".")) else None)

    paths = [re.sub(r"<[^>]*>|\[\]", "", name) for name in RECORDED]
    known = [path for path in paths if find_key(path) or allowlist.is_inner(path) or owner(tuple(path.split(".")))]
    assert {*paths} - {*known, *allowlist.ALIASES} == set()
    assert len(paths) > 600
    assert [name for name in allowlist.ALIASES if name not in paths] == []
    assert [word for word in allowlist.FORMER if word in paths and word not in allowlist.ALIASES] == []


@pytest.mark.parametrize("key", [key for key in KEYS if key.kind in (Kind.INT, Kind.FLOAT)], ids=lambda key: key.path)
def test_range_ends_where_it_says_and_a_refusal_offers_a_value_that_the_key_takes(key: Key) -> None:
    tiny = 1 if key.kind is Kind.INT else 1e-9
    for bound, sign in ((key.minimum, -1), (key.maximum, 1)):
        if bound is not None:
            end = int(bound) if key.kind is Kind.INT else bound
            assert accept(key, end) == bound
            with pytest.raises(ConfigError):
                accept(key, end + sign * tiny)
    for bound in (key.above, key.below):
        if bound is not None:
            with pytest.raises(ConfigError):
                accept(key, float(bound))
    if key.default is not None:
        assert repr(accept(key, key.default)) == repr(key.default)  # in its canonical type
    for value in (float("nan"), float("inf"), -float("inf"), True, "1", "nan", "1e999", [], {}, 10**400, -(10**400)):
        with pytest.raises(ConfigError) as refusal:
            accept(key, value)
        offered = re.search(r"Write \w+ = (\S+)", refusal.value.fix)
        assert offered
        accept(key, json.loads(offered[1]))


def test_description_names_every_key_and_every_lock_and_fits_80_columns() -> None:
    lines = allowlist.describe_keys((), "", KEYS)
    start = lines.index("locked keys: not allowed in train.toml, nor any key below them (*: in every table)")
    assert [line for line in lines[:start] if len(line) > 80] == []
    table, described = "", set()
    for line in lines[:start]:
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif re.match(r"  [a-z*]", line):
            described.add(table + line.split()[0])
    assert described == {key.path for key in KEYS}
    for entry in allowlist.LOCKS:
        assert all(any(path in line for line in lines[start:]) for path in entry.paths)
    [marked] = {*allowlist.describe_keys({"trainer.loss.kl_tau"}, "", KEYS)} - {*lines}
    assert marked.startswith("- kl_tau = 0.001 ")
    fewer = {*allowlist.describe_keys((), "trl", KEYS)} - {*lines}
    assert {line.partition('"  ')[2].strip() for line in fewer} == {"grpo | max_rl", "adamw | sgd | muon"}

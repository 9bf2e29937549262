"""Nightshift imports `data` and `scoring`, which import nothing heavy. prime-rl imports the taskset, on first use."""

from typing import Any

__all__ = ["ChatHarness", "Taskset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nightshift_NAME import taskset

    return getattr(taskset, name)

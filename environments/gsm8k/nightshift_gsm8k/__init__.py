"""GSM8K for Nightshift. `data` and `scoring` import nothing heavy; the taskset is imported on first use."""

from typing import Any

__all__ = ["Gsm8kTaskset", "ChatHarness"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nightshift_gsm8k import taskset

    return getattr(taskset, name)

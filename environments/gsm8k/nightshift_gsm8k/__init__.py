"""GSM8K for Nightshift. `data` and `scoring` import nothing heavy; the taskset is imported on first use."""

from nightshift_gsm8k.shared import lazy

__all__ = ["Gsm8kTaskset", "ChatHarness"]

__getattr__ = lazy(__name__, __all__)

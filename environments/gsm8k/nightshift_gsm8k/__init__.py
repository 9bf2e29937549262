from nightshift_gsm8k.shared import lazy

__all__ = ["ChatHarness", "Gsm8kTaskset"]
__getattr__ = lazy(__name__, __all__)

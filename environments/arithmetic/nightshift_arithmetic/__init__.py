from nightshift_gsm8k.shared import lazy

__all__ = ["ArithmeticTaskset", "ChatHarness"]
__getattr__ = lazy(__name__, __all__)

"""Watch the adversarial robustness of a classifier while it trains."""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]

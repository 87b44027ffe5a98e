"""Watch the adversarial robustness of a classifier while it trains."""

from lightning_robustness.utilities.input_space import InputSpace

__version__ = "0.1.0.dev0"

__all__ = ["InputSpace", "__version__"]

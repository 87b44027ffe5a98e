import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor


class EpochMeans:
    """Weighted means over an epoch and all processes, which stay on the device until they are computed.

    Example:
        >>> import torch
        >>> from lightning.pytorch.strategies import SingleDeviceStrategy
        >>> from lightning_robustness.callbacks.epoch_means import EpochMeans
        >>> means = EpochMeans()
        >>> means.add("loss", torch.tensor(1.0), weight=3)
        >>> means.add("loss", torch.tensor(5.0), weight=1)
        >>> means.compute(SingleDeviceStrategy())
        {'loss': tensor(2.)}

    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor, weight: Tensor | int) -> None:
        """Add the mean of a value over a batch of ``weight`` samples; with 0 samples it does not count."""
        value = value.detach().float().mean()  # Lightning takes losses of shape (1,) too
        weight = torch.as_tensor(weight, dtype=value.dtype, device=value.device)
        pair = torch.stack([torch.where(weight > 0, value, 0.0) * weight, weight])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def compute(self, strategy: Strategy) -> dict[str, Tensor]:
        """Return the means and start over; every process must call it."""
        sums, self._sums = self._sums, {}
        totals = {name: strategy.reduce(pair, reduce_op="sum") for name, pair in sums.items()}
        return {name: total[0] / total[1] for name, total in totals.items() if total[1] > 0}

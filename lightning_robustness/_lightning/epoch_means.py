import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor


class EpochMeans:
    """Weighted means over an epoch and all processes, which stay on the device until they are computed.

    Example:
        >>> import torch
        >>> from lightning.pytorch.strategies import SingleDeviceStrategy
        >>> from lightning_robustness._lightning.epoch_means import EpochMeans
        >>> means = EpochMeans()
        >>> means.add("loss", torch.tensor(1.0), weight=3)
        >>> means.add("loss", torch.tensor(5.0), weight=1)
        >>> means.compute(SingleDeviceStrategy())
        {'loss': tensor(2.)}

    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._weights: dict[str, Tensor | int] = {}

    def add(self, name: str, value: Tensor | float, weight: Tensor | int) -> None:
        """Add the mean of a value over a batch of ``weight`` samples; with 0 samples it does not count."""
        if isinstance(value, Tensor):
            value = value.detach().float()
            value = value.mean() if value.ndim else value  # Lightning takes losses of shape (1,) too
        if isinstance(weight, Tensor):
            value = torch.where(weight > 0, value, 0.0)
        elif weight == 0:
            value = 0.0  # it may be NaN
        self._sums[name] = self._sums.get(name, 0.0) + value * weight
        self._weights[name] = self._weights.get(name, 0) + weight

    def compute(self, strategy: Strategy) -> dict[str, Tensor]:
        """Return the means and start over; every process must call it."""
        sums, weights, self._sums, self._weights = self._sums, self._weights, {}, {}
        totals = {}
        for name, total in sums.items():
            numbers = torch.as_tensor(total), torch.as_tensor(weights[name])
            pair = torch.stack([number.to(strategy.root_device, torch.float32) for number in numbers])
            totals[name] = strategy.reduce(pair, reduce_op="sum")
        return {name: total[0] / total[1] for name, total in totals.items() if total[1] > 0}

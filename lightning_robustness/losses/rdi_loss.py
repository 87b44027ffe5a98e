from torch import Tensor

from lightning_robustness._arguments import check_features_and_preds
from lightning_robustness.functional._class_statistics import class_statistics
from lightning_robustness.functional.robustness_difference_index import _robustness_difference_index_compute


def rdi_loss(features: Tensor, y: Tensor) -> Tensor:
    r"""Compute one minus the robustness difference index (RDI) of a batch, to be added to a training loss.

    .. math:: L = 1 - \text{RDI} \in [0, 2]

    With RDI as in :func:`~lightning_robustness.functional.robustness_difference_index`, but by true labels: while the
    network learns, these keep every class populated, and samples that are in the wrong place are pulled to their own
    class, where predicted labels would leave them as they were. Classes of which the batch has one sample count as
    perfectly dense, so that batches should hold several samples of each; a batch of one class alone has the loss 2,
    without a gradient. The loss does not change with the scale of the features.

    Args:
        features: Floating point tensor of shape ``(N, D)``, the logits of the samples or another layer's output;
            dimensions after the first are flattened.
        y: Integer tensor of shape ``(N,)`` with the true labels, or those to group by.

    Returns:
        Scalar tensor, differentiable in the features.

    Raises:
        TypeError: If the features are not floating point or the labels not integers.
        ValueError: If shapes do not fit, labels are negative or features are not finite.

    Example:
        >>> import torch
        >>> from lightning_robustness.losses import rdi_loss
        >>> features = torch.tensor([[0.0, 0.0], [0.0, 2.0], [8.0, 0.0], [8.0, 2.0]])
        >>> rdi_loss(features, y=torch.tensor([0, 0, 1, 1]))
        tensor(0.2500)

    """
    features = check_features_and_preds(features, y, name="y")
    statistics = class_statistics(features, y, p=2.0)
    if len(statistics.classes) < 2:  # as it may happen in training, without a warning
        return 2 + 0.0 * statistics.centers.sum().to(statistics.dtype)
    return 1 - _robustness_difference_index_compute(statistics)[0].to(statistics.dtype)

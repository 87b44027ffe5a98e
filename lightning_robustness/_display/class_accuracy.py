from collections.abc import Sequence
from typing import NamedTuple

from lightning_robustness._display.table import Table
from lightning_robustness._measurement.meters.attack import AttackOutcome

_MAX_ROWS = 20


class ClassAccuracy(NamedTuple):
    """Accuracy of one class, over the attacked samples."""

    label: int
    samples: int
    clean: float
    robust: float


def class_accuracies(worst: AttackOutcome) -> list[ClassAccuracy]:
    """Compute the accuracy of each class from the worst case of all attacks.

    Example:
        >>> import torch
        >>> from lightning_robustness._display.class_accuracy import class_accuracies
        >>> from lightning_robustness._measurement.meters.attack import AttackOutcome
        >>> y, preds, adv_preds = torch.tensor([[0, 0, 2, 2], [0, 0, 2, 1], [0, 1, 1, 1]])
        >>> outcome = AttackOutcome.empty(torch.device("cpu"))._replace(y=y, preds=preds, adv_preds=adv_preds)
        >>> [tuple(accuracy) for accuracy in class_accuracies(outcome)]
        [(0, 2, 1.0, 0.5), (2, 2, 0.5, 0.0)]

    """
    accuracies = []
    for label in worst.y.unique().tolist():
        rows = worst.y == label
        clean, robust = ((preds[rows] == label).double().mean().item() for preds in (worst.preds, worst.adv_preds))
        accuracies.append(ClassAccuracy(label, int(rows.sum()), clean, robust))
    return accuracies


def class_table(accuracies: Sequence[ClassAccuracy]) -> Table:
    """Write the accuracies of classes as a table, the least robust first, of at most 20 classes."""
    ordered = sorted(accuracies, key=lambda accuracy: (accuracy.robust, accuracy.clean, accuracy.label))
    shown = f" ({_MAX_ROWS} of {len(ordered)})" if len(ordered) > _MAX_ROWS else ""
    return Table(
        f"Classes, the least robust first{shown}",
        ["class", "clean", "robust", "samples"],
        [[a.label, a.clean, a.robust, a.samples] for a in ordered[:_MAX_ROWS]],
        note="Accuracy over the attacked samples, without an attack and under the worst of all attacks."
        if ordered
        else "",
    )

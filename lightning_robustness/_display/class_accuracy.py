from collections.abc import Sequence

from lightning_robustness._display.table import Table
from lightning_robustness._measurement.findings import ClassAccuracy

_MAX_ROWS = 20


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

import torch
from sklearn.metrics import recall_score

from lightning_robustness._display.class_accuracy import ClassAccuracy, class_accuracies, class_table
from lightning_robustness._measurement.meters.attack import AttackOutcome


def test_accuracies_are_recalls():
    generator = torch.Generator().manual_seed(0)
    y, preds, adv_preds = torch.randint(0, 5, (3, 200), generator=generator)
    outcome = AttackOutcome.empty(torch.device("cpu"))._replace(y=y, preds=preds, adv_preds=adv_preds)
    found = class_accuracies(outcome)
    assert [accuracy.label for accuracy in found] == [0, 1, 2, 3, 4]
    assert [accuracy.samples for accuracy in found] == y.bincount().tolist()
    for name, labels in {"clean": preds, "robust": adv_preds}.items():
        assert [getattr(accuracy, name) for accuracy in found] == recall_score(y, labels, average=None).tolist()


def test_table_has_the_least_robust_classes():
    table = class_table([ClassAccuracy(label, 3, 1.0, label / 100) for label in reversed(range(30))])
    assert table.title == "Classes, the least robust first (20 of 30)"
    assert [row[0] for row in table.rows] == list(range(20))
    assert class_table([ClassAccuracy(7, 3, 0.75, 0.5)]).rows == [[7, 0.75, 0.5, 3]]
    assert class_table([]).rows == []

import torch
from sklearn.metrics import recall_score

from lightning_robustness._measurement.findings import class_accuracies
from lightning_robustness._measurement.rows import Rows


def test_accuracies_are_recalls():
    y, preds, adv_preds = torch.randint(0, 5, (3, 200), generator=torch.Generator().manual_seed(0))
    found = class_accuracies(Rows(torch.arange(200), {"y": y, "preds": preds, "adv_preds": adv_preds}))
    assert [accuracy.label for accuracy in found] == [0, 1, 2, 3, 4]
    assert [accuracy.samples for accuracy in found] == y.bincount().tolist()
    for name, labels in {"clean": preds, "robust": adv_preds}.items():
        assert [getattr(accuracy, name) for accuracy in found] == recall_score(y, labels, average=None).tolist()

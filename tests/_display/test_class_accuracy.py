from lightning_robustness._display.class_accuracy import class_table
from lightning_robustness._measurement.findings import ClassAccuracy


def test_table_has_the_least_robust_classes():
    table = class_table([ClassAccuracy(label, 3, 1.0, label / 100) for label in reversed(range(30))])
    assert table.title == "Classes, the least robust first (20 of 30)"
    assert [row[0] for row in table.rows] == list(range(20))
    assert class_table([ClassAccuracy(7, 3, 0.75, 0.5)]).rows == [[7, 0.75, 0.5, 3]]
    assert class_table([]).rows == []

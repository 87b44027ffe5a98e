from lightning_robustness._display.table import glossary
from lightning_robustness._measurement.keys import KEYS


def test_each_family_is_explained_once():
    table = glossary(["epoch", "asr/pgd", "asr/cw", "rdi", "seconds/pgd", "samples"])
    assert [row[0] for row in table.rows] == ["rdi", "asr/<attack>"]
    assert table.rows[0][1:] == [next(key.glossary for key in KEYS if key.name == "rdi"), "", "higher"]
    assert glossary([]).rows == []
    assert glossary(iter(["rdi", "acc"])).rows == glossary(["acc", "rdi"]).rows

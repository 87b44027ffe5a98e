import re


def rows_of(output):
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", output, flags=re.MULTILINE)
    return [(int(epoch), *map(float, values)) for epoch, *values in rows]


def test_rdi_stops_training_and_the_most_robust_epoch_is_kept(run_example, logged):
    _, output = run_example("early_stopping.py", "--epochs", "12", "--patience", "1")
    rows = rows_of(output)
    for column, key in enumerate(("acc", "rdi", "adv_acc/pgd"), start=1):
        assert [row[column] for row in rows] == [round(v, 3) for v in logged(f"robustness/{key}").values()]
    stopped = len(rows) - 1
    assert 0 < stopped < 11
    assert f"Stopped after epoch {stopped}: neither RDI nor accuracy under PGD improved" in output
    assert rows[stopped][1] <= max(row[1] for row in rows[:-1]), "not while accuracy rises"

    tied = [row for row in rows if row[3] >= max(row[3] for row in rows) - 0.005]
    kept = max(tied, key=lambda row: (row[1], row[0]))
    assert f"checkpoints/epoch={kept[0]}-step=" in output
    values = dict(re.findall(r"^  (\S+) +([\d.]+)$", output, flags=re.MULTILINE))
    assert [float(values[key]) for key in ("acc", "rdi", "adv_acc/pgd")] == list(kept[1:])
    assert re.search(rf"^verdict +epoch {kept[0]} kept: ", output, flags=re.MULTILINE)


def test_training_ends_without_stopping(run_example):
    _, output = run_example("early_stopping.py", "--epochs", "1")
    assert "Took all 1 epochs: RDI and accuracy under PGD did not stop it." in output
    assert "checkpoints/epoch=0-step=" in output

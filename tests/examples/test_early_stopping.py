import re


def test_training_stops_where_rdi_does_and_the_best_checkpoint_is_kept(run_example, logged):
    _, output = run_example("early_stopping.py", "--epochs", "8", "--patience", "1")
    curve = list(logged("robustness/rdi").values())
    first_fall = next(epoch for epoch in range(1, 8) if curve[epoch] <= max(curve[:epoch]))
    assert len(curve) == first_fall + 1 < 8
    assert f"Stopped after epoch {first_fall}: RDI did not rise for 1 epochs." in output
    assert "RDI, epoch by epoch: " + " ".join(f"{value:.3f}" for value in curve) in output

    best = curve.index(max(curve))
    assert f"checkpoints/epoch={best}-step=" in output
    assert f"is from epoch {best}:" in output
    values = dict(re.findall(r"^  (\S+) +([\d.]+)$", output, flags=re.MULTILINE))
    assert values["rdi"] == f"{max(curve):.3f}"
    assert best == 0, "the epoch that was attacked"
    for key in ("acc", "adv_acc/pgd"):
        assert values[key] == f"{next(iter(logged(f'robustness/{key}').values())):.3f}"


def test_training_ends_without_stopping(run_example):
    _, output = run_example("early_stopping.py", "--epochs", "1")
    assert "Ran all 1 epochs: RDI did not stop training." in output
    assert "is from epoch 0:" in output

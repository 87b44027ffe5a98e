import re

import pytest

from lightning_robustness._measurement.assisted import Estimate
from lightning_robustness._measurement.threat_model import AttackFacts, ThreatModel
from tests.evaluation.reports.reports import ATTACKS, EPS, make_sweep


def test_text_has_a_row_for_every_attack_and_budget():
    sweep = make_sweep(settings={"seed": "3"})
    lines = str(sweep).splitlines()
    start = lines.index("Accuracy and image quality") + 2
    rows = [line.split() for line in lines[start : start + len(ATTACKS) * len(EPS)]]
    for number, (attack, column) in enumerate((attack, column) for attack in ATTACKS for column in range(len(EPS))):
        values = [sweep.values[name][ATTACKS.index(attack)][column] for name in sweep.values]
        assert rows[number][:2] == [f"{EPS[column]:g}", attack]
        assert [float(cell) for cell in rows[number][2:]] == [float(f"{value:.4f}") for value in values]
    assert lines[-1].split() == ["seed", "3"]


def test_curves_start_at_clean_accuracy():
    sweep = make_sweep()
    (axis,) = sweep.plot().axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in axis.lines}
    expected = dict(zip([*ATTACKS, "worst of all"], [*sweep.values["accuracy"], sweep.worst], strict=True))
    assert drawn == {name: [0.9, *values] for name, values in expected.items()}
    assert axis.lines[0].get_xdata().tolist() == [0.0, *EPS]
    assert [line.get_linestyle() for line in axis.lines] == ["-", "-", "--"]
    assert [text.get_text() for text in axis.get_legend().texts] == list(expected)


@pytest.mark.parametrize("metric", ["accuracy", "psnr", "ald2"])
def test_plot_draws_any_metric(metric):
    sweep = make_sweep()
    line = sweep.plot(metric).axes[0].lines[0]
    assert line.get_ydata().tolist()[-3:] == sweep.values[metric][0]
    with pytest.raises(ValueError, match=r"ald2.*'lpips'"):
        sweep.plot("lpips")


def test_budgets_of_images_are_in_steps_of_pixels():
    threat = ThreatModel({"pgd": AttackFacts({"linf": 2 / 255}, "10 steps")}, 100, is_image=True)
    sweep = make_sweep(budgets=[2 / 255, 4 / 255, 8 / 255], threat_model=threat)
    assert sweep.plot().axes[0].get_xlabel() == "perturbation budget (pixels from 0 to 1, linf)"


def test_verdict_on_a_sweep():
    expected = r"^50.0 % robust accuracy at 0.2{} \(40-60 %, n = 100\), 90.0 % clean{}\.$"
    assert re.search(expected.format("", ""), make_sweep(worst=[0.9, 0.5, 0.1]).verdict)
    threat = ThreatModel({"pgd": AttackFacts({"l2": 0.1}, "10 steps")}, 100)
    sweep = make_sweep(worst=[0.9, 0.5, 0.1], threat_model=threat, interrupted=True)
    assert re.search(expected.format(" in l2", "; interrupted .*"), sweep.verdict)


def test_robust_accuracy_is_known_at_the_budgets():
    sweep = make_sweep(worst=[0.9, 0.5, 0.1])
    assert [sweep.robust_accuracy(eps).value for eps in (None, 0, 0.1, 0.3)] == [0.5, 0.9, 0.9, 0.1]
    assisted = make_sweep(shares={"worst": [Estimate(0.5, 0.45, 0.55, 0.6, True)] * 3})
    assert assisted.robust_accuracy(0.1)[:3] == (0.5, 0.45, 0.55)
    with pytest.raises(ValueError, match=r"`eps` .* 0.1, 0.2, 0.3, or 0 .*0.15"):
        sweep.robust_accuracy(0.15)

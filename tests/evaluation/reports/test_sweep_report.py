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


def test_interruption_is_noted():
    assert make_sweep().notes == []
    assert make_sweep(interrupted=True).notes == ["The sweep was interrupted: it covers 100 samples."]

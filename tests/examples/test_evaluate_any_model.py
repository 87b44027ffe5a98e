import re


def test_example_breaks_a_natural_network(tmp_path, run_example):
    _, text = run_example("evaluate_any_model.py", "--epochs", "4", "--samples", "60", "--output", "report.html")
    accuracy = float(re.search(r"^accuracy +([\d.]+)", text, flags=re.MULTILINE).group(1))
    attacked = float(re.search(r"^accuracy under the worst attack +([\d.]+)", text, flags=re.MULTILINE).group(1))
    assert accuracy > 0.8
    assert attacked < accuracy - 0.3
    assert text.splitlines()[0].endswith("clean; no signs of masked gradients.")
    assert (tmp_path / "report.html").read_text().count('<svg class="drawing"') == 4

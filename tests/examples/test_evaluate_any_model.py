import re
import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "evaluate_any_model.py"


def test_example_breaks_a_natural_network(tmp_path, monkeypatch, capsys):
    page = tmp_path / "report.html"
    options = {"--epochs": "4", "--samples": "60", "--output": str(page)}
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *(part for option in options.items() for part in option)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    text = capsys.readouterr().out
    accuracy = float(re.search(r"^accuracy +([\d.]+)", text, flags=re.MULTILINE).group(1))
    attacked = float(re.search(r"^accuracy under the worst attack +([\d.]+)", text, flags=re.MULTILINE).group(1))
    assert accuracy > 0.8
    assert attacked < accuracy - 0.3
    assert text.splitlines()[0].endswith("clean; no signs of masked gradients.")
    assert page.read_text().count('<svg class="drawing"') == 4

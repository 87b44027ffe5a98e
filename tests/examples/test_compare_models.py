import re
import runpy
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "compare_models.py"


def test_example_ends_in_a_page(tmp_path, monkeypatch, capsys):
    page = tmp_path / "report.html"
    options = {"--epochs": "1", "--samples": "30", "--budgets": "2", "--output": str(page)}
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *(part for option in options.items() for part in option)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    text = capsys.readouterr().out
    models = {"natural", "robust 0.05", "robust 0.15", "robust 0.25"}
    summary = re.search(r"Models, the most robust first\n.*\n((?:.+\n)+)", text).group(1)
    scores = dict(re.findall(r"^(\S+(?: \S+)?)  +([\d.]+)  ", summary, flags=re.MULTILINE))
    assert scores.keys() == models
    assert [float(score) for score in scores.values()] == sorted(map(float, scores.values()), reverse=True)
    assert all(re.search(rf"<td[^>]*>{name}</td>", page.read_text()) for name in models)
    assert page.read_text().count("<svg") == 9

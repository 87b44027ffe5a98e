import re


def test_example_ends_in_a_page(tmp_path, run_example):
    options = ("--epochs", "1", "--samples", "30", "--budgets", "2", "--output", "report.html")
    _, text = run_example("compare_models.py", *options)
    page = (tmp_path / "report.html").read_text()
    models = {"natural", "robust 0.05", "robust 0.15", "robust 0.25"}
    summary = re.search(r"Models, the most robust first\n.*\n((?:.+\n)+)", text).group(1)
    scores = dict(re.findall(r"^(\S+(?: \S+)?)  +([\d.]+)  ", summary, flags=re.MULTILINE))
    assert scores.keys() == models
    assert [float(score) for score in scores.values()] == sorted(map(float, scores.values()), reverse=True)
    assert all(re.search(rf"<td[^>]*>{name}</td>", page) for name in models)
    assert page.count("<svg") == 9

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_digits

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "benchmarks" / "paper_tables"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_the_tables_in_the_docs_are_those_of_the_results(run_script):
    _, output = run_script(SCRIPTS / "tables.py")
    printed = dict(re.findall(r"^## (.*?)\n\n(.*?)\n$", output, flags=re.M | re.S))
    text = (ROOT / "docs" / "evidence.md").read_text()
    written = dict(re.findall(r"<!-- (.*?) -->\n\n(.*?)\n\n<!-- end -->", text, flags=re.S))
    assert sorted(written) == sorted(printed)
    assert [name for name in printed if written[name] != printed[name]] == []


def test_the_figures_in_the_docs_exist():
    text = (ROOT / "docs" / "evidence.md").read_text()
    figures = re.findall(r"\]\((images/evidence_.*?\.png)\)", text)
    assert len(figures) == 5
    assert all((ROOT / "docs" / figure).exists() for figure in figures)


def write_idx(directory, images, labels, name):
    for kind, values, dimensions in (("images-idx3", images, 3), ("labels-idx1", labels, 1)):
        header = np.array([0x800 + dimensions, *values.shape], dtype=">i4").tobytes()
        content = header + values.astype(np.uint8).tobytes()
        (directory / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))


def test_the_pipeline_trains_measures_and_resumes(tmp_path, run_script):
    digits = load_digits()
    pixels = np.pad(digits.images.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2))) * 15 // 1
    write_idx(tmp_path, pixels[:1200], digits.target[:1200], "train")
    write_idx(tmp_path, pixels[1200:], digits.target[1200:], "t10k")
    places = ["mnist", "--data", tmp_path, "--work", tmp_path]
    run_script(SCRIPTS / "train.py", *places, "--only", "fc-2x100.natural.0", "--samples", 1200)
    sizes = {"features": 300, "fisher": 8, "attacks": 6, "adversarial": 40, "sweep": 4, "clever": 2}
    options = [part for name, size in sizes.items() for part in (f"--{name}", size)]
    output = tmp_path / "results.json"
    run_script(SCRIPTS / "measure.py", *places, *options, "--output", output, "--only", "fc-2x100.natural.0/")

    results = json.loads(output.read_text())
    entry = results["networks"]["fc-2x100.natural.0"]
    saved = torch.load(tmp_path / "mnist" / "fc-2x100.natural.0.pt")
    assert saved["settings"] == {"samples": 1200, "epochs": 3}
    assert entry["parameters"] == 784 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10
    x = torch.tensor(pixels[1200:1500] / 255, dtype=torch.float32).flatten(1)
    weights = list(saved["state"].values())
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        x = torch.relu(x) @ weight.T + bias
    accuracy = (x.argmax(dim=1) == torch.tensor(digits.target[1200:1500])).double().mean().item()
    assert entry["features"]["acc"] == pytest.approx(accuracy, abs=1e-4)
    assert entry["attacks"]["cascade"]["count"] == 6
    assert entry["attacks"]["cascade"]["adv_acc"] <= entry["attacks"]["pgd20"]["adv_acc"]
    assert len(entry["sweep"]["worst"]) == 20
    assert 0 < entry["clever"]["clever"] <= 2

    # A part that is there is left alone, unless it is asked for
    entry["clever"]["clever"], entry["fisher"]["fim"] = -1.0, -1.0
    output.write_text(json.dumps(results))
    run_script(
        SCRIPTS / "measure.py",
        *places,
        *options,
        "--output",
        output,
        "--only",
        "fc-2x100.natural.0/clever",
    )
    again = json.loads(output.read_text())["networks"]["fc-2x100.natural.0"]
    assert again["clever"]["clever"] > 0
    assert again["fisher"]["fim"] == -1.0


def test_correlations_are_those_of_scipy(scripts):
    import agreement

    generator = np.random.default_rng(0)
    x, z = generator.normal(size=(2, 15))
    x, y = np.round(x, 1), np.round(x + z, 0)  # with ties
    for ours, theirs in (
        (agreement.pearson, stats.pearsonr),
        (agreement.spearman, stats.spearmanr),
        (agreement.kendall, stats.kendalltau),
    ):
        found = agreement.agreement(ours, x.tolist(), y.tolist())
        assert found.value == pytest.approx(theirs(x, y)[0], abs=1e-6)
        assert found.low < found.value < found.high
    ranks = [stats.rankdata(values) for values in (x, y, z)]
    left = [values - np.polyval(np.polyfit(ranks[2], values, 1), ranks[2]) for values in ranks[:2]]
    partial = agreement.agreement(agreement.partial_spearman, x.tolist(), y.tolist(), z.tolist())
    assert partial.value == pytest.approx(stats.pearsonr(*left)[0], abs=1e-6)


def test_a_constant_series_has_no_correlation(scripts):
    import agreement

    found = agreement.agreement(agreement.spearman, [1.0, 1.0, 1.0], [1.0, 2.0, 3.0])
    assert str(found) == "-"


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([(0.5, 0.1, 0.9), (0.4, 0.1, 0.6)], "holds"),
        ([(0.5, 0.1, 0.9), (0.4, -0.1, 0.6)], "holds in part"),
        ([(0.5, 0.1, 0.9), (-0.4, -0.6, 0.1)], "not shown"),
        ([(0.5, -0.1, 0.9), (0.4, -0.1, 0.6)], "not shown"),
        ([(0.5, 0.1, 0.9), (-0.4, -0.6, -0.1)], "fails"),
    ],
)
def test_verdicts_on_correlations(scripts, intervals, verdict):
    import claims
    from agreement import Agreement

    assert claims.judge(Agreement(*interval) for interval in intervals) == verdict


@pytest.mark.parametrize(
    ("agreeing", "verdict"), [(8, "holds"), (6, "mostly holds"), (5, "not shown"), (2, "not shown"), (1, "fails")]
)
def test_verdicts_on_pairs(scripts, agreeing, verdict):
    import claims

    assert claims.judge_pairs(agreeing, 8) == verdict

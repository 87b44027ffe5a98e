import json
import sys
from pathlib import Path

import pytest
import torch

from lightning_robustness import cli
from lightning_robustness.evaluation import ComparisonReport, RobustnessReport, evaluate
from tests.evaluation.checkpoint_models import Data, Net
from tests.evaluation.reports import make_full_report, make_report, make_sweep

HERE = "tests.evaluation.checkpoint_models"
DATA = ["--data", f"{HERE}:Data", "--progress", "false"]


@pytest.fixture(autouse=True)
def _directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def checkpoint():
    torch.manual_seed(1)
    net = Net()
    torch.save(net.state_dict(), "net.pt")
    return net.eval()


def test_evaluate_is_that_of_the_package(checkpoint, capsys):
    arguments = ["--attacks", "fgsm", "pgd", "--eps", "1/10", "--samples", "20", "--sweep_eps", "0.05", "1/10"]
    code = cli.main(
        [
            "evaluate",
            "--model",
            f"{HERE}:Net",
            "--checkpoint",
            "net.pt",
            *DATA,
            *arguments,
            "--json",
            "x.json",
            "--html",
            "x.html",
        ]
    )
    assert code == 0
    expected = evaluate(
        checkpoint, Data().test_dataloader(), ["fgsm", "pgd"], 0.1, samples=20, sweep_eps=[0.05, 0.1], progress=False
    )
    report = RobustnessReport.from_json("x.json")
    assert report.rates == expected.rates
    assert report.sweep.values["accuracy"] == expected.sweep.values["accuracy"]
    assert str(report) == capsys.readouterr().out.rstrip("\n")
    assert "<h1>Robustness of Net</h1>" in Path("x.html").read_text()


def test_options_of_the_input_space_and_the_data(checkpoint):
    options = ["--input_space.mean", "0", "--input_space.std", "0.5", "--input_space.high", "0.5", "--attacks"]
    arguments = ["--split", "val", "--data_args", "{number: 30}", "--model_args", "{width: 4}", "--json", "x.json"]
    assert cli.main(["evaluate", "--model", f"{HERE}:Net", "--checkpoint", "net.pt", *DATA, *options, *arguments]) == 0
    report = RobustnessReport.from_json("x.json")
    assert report.metrics["samples"] == 15
    assert report.settings["input space"] == "InputSpace(low=0.0, high=0.5, mean=0.0, std=0.5)"
    assert report.rates == {}


def test_options_from_a_file(checkpoint):
    config = {"model": f"{HERE}:Net", "checkpoint": "net.pt", "data": f"{HERE}:Data", "attacks": ["fgsm"], "eps": 0.1}
    Path("config.yaml").write_text(json.dumps(config))
    assert cli.main(["evaluate", "--config", "config.yaml", "--progress", "false", "--json", "x.json"]) == 0
    assert list(RobustnessReport.from_json("x.json").rates) == ["fgsm", "worst"]


def test_modules_of_the_current_directory_are_found(checkpoint):
    Path("my_models.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(2, 3)\n")
    assert cli.main(["evaluate", "--model", "my_models:make", *DATA, "--attacks"]) == 0


def test_compare_models_and_reports(checkpoint, capsys):
    sweep = ["--sweep_eps", "0.05", "0.1", "--sweep_attacks", "fgsm", "--attacks"]
    assert (
        cli.main(["evaluate", "--model", f"{HERE}:Net", "--checkpoint", "net.pt", *DATA, *sweep, "--json", "a.json"])
        == 0
    )
    models = ["--models", "saved=a.json", f"loaded={HERE}:Net@net.pt", f"fresh={HERE}:make_net"]
    settings = ["--attacks", "fgsm", "--eps", "0.05", "1/10", "--prior", "{accuracy: 2}", "--balance", "0.08"]
    assert cli.main(["compare", *models, *DATA, *settings, "--json", "c.json"]) == 0
    report = ComparisonReport.from_json("c.json")
    assert report.scores["saved"] == pytest.approx(report.scores["loaded"])
    assert report.ranks["cmmr"].keys() == {"saved", "loaded", "fresh"}
    assert (report.prior, report.balance) == ({"accuracy": 2.0}, 0.08)
    assert "Robustness of several models" in capsys.readouterr().out


@pytest.mark.parametrize(
    "report", [make_full_report(), make_sweep(), ComparisonReport({"a": make_report()})], ids=lambda r: type(r).__name__
)
def test_report_shows_what_was_saved(report, capsys):
    report.to_json("x.json")
    assert cli.main(["report", "x.json", "--html", "x.html"]) == 0
    assert capsys.readouterr().out == f"{report}\n"
    assert f"<h1>{report.title}</h1>" in Path("x.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "{evaluate,compare,report}"),
        (["evaluate", *DATA], "evaluate.model"),
        (["evaluate", "--model", "no_such:Net", *DATA], "there is no 'no_such'"),
        (["evaluate", "--model", f"{HERE}:Net", "--checkpoint", "none.pt", *DATA], "there is no such file"),
        (
            ["evaluate", "--model", f"{HERE}:Net", *DATA, "--eps", "1/0"],
            "Expected a budget such as 0.1 or 8/255 but got",
        ),
        (
            ["evaluate", "--model", f"{HERE}:Net", *DATA, "--attacks", "no"],
            "Expected the name of an attack but got 'no'",
        ),
        (["evaluate", "--model", f"{HERE}:Net", *DATA, "--sweep_eps", "0.2", "0.1"], "positive, increasing budgets"),
        (["evaluate", "--model", f"{HERE}:Net", *DATA, "--fim_method", "best"], "fim_method"),
        (
            ["evaluate", "--model", f"{HERE}:Net", *DATA, "--input_space.low", "1", "--input_space.high", "0"],
            "Expected `low` to be smaller than `high`",
        ),
        (["evaluate", "--model", f"{HERE}:Net", *DATA, "--input_space.std", "0"], "Expected `std` to be positive"),
        (
            ["evaluate", "--model", f"{HERE}:Net", *DATA, "--json", "none/x.json"],
            "Expected a file in a directory that exists but got none/x.json",
        ),
        (["report", "x.json", "--html", "."], "Expected a file in a directory that exists but got ."),
        (
            ["compare", "--models", f"a={HERE}:Net", *DATA, "--prior", "{acc: 2}"],
            "Expected prior weights for accuracy, ssim, psnr, mse, ald2 but got 'acc'",
        ),
        (
            ["compare", "--models", f"a={HERE}:Net", *DATA, "--balance", "2"],
            "Expected `balance` to be in [0, 1) but got 2.0",
        ),
        (
            ["compare", "--models", "net.pt"],
            "Expected name=package.module:Class@checkpoint or name=report.json but got",
        ),
        (
            ["compare", "--models", f"a={HERE}:Net", f"a={HERE}:Net", *DATA],
            "models of different names but got 'a' twice",
        ),
        (["compare", "--models", "a=none.json"], "No such file or directory: 'none.json'"),
        (["report", "none.json"], "No such file or directory: 'none.json'"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_file_without_a_report_exits_with_2(capsys):
    Path("x.json").write_text("{}")
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["report", "x.json"])
    assert exit_info.value.code == 2
    assert (
        "Expected one of RobustnessReport, ComparisonReport, SweepReport in x.json but got None"
        in capsys.readouterr().err
    )


def test_file_without_all_fields_exits_with_2(capsys):
    Path("x.json").write_text('{"kind": "SweepReport"}')
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["report", "x.json"])
    assert exit_info.value.code == 2
    assert "Expected all fields of a SweepReport in x.json but some are missing" in capsys.readouterr().err


def test_page_without_matplotlib_exits_with_2(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["evaluate", "--model", f"{HERE}:Net", *DATA, "--html", "x.html"])
    assert exit_info.value.code == 2
    assert 'pip install "lightning-robustness[plot]"' in capsys.readouterr().err


def test_traceback_of_wrong_arguments(capsys):
    arguments = ["evaluate", "--model", f"{HERE}:Net", "--data", f"{HERE}:make_nothing"]
    for options, is_shown in (([], False), (["--traceback"], True)):
        with pytest.raises(SystemExit) as exit_info:
            cli.main([*options, *arguments])
        assert exit_info.value.code == 2
        assert ("Traceback" in capsys.readouterr().err) == is_shown


def test_failed_evaluation_exits_with_1(capsys):
    arguments = [
        "evaluate",
        "--model",
        f"{HERE}:Net",
        "--data",
        f"{HERE}:make_unlabelled_loader",
        "--progress",
        "false",
    ]
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert "lightning-robustness: ValueError: Expected batches with labels" in error
    assert "Traceback" not in error
    assert cli.main(["--traceback", *arguments]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:The evaluation was interrupted")
def test_interruption_exits_with_130_and_writes_what_there_is(capsys):
    arguments = ["--model", f"{HERE}:Interrupted", *DATA, "--attacks", "pgd", "--json", "x.json"]
    assert cli.main(["evaluate", *arguments]) == 130
    report = RobustnessReport.from_json("x.json")
    assert report.interrupted == "the Fisher information"
    assert report.metrics["samples"] == 40
    assert "Note: The run was interrupted while it measured the Fisher information" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:The evaluation was interrupted", "ignore:The sweep was interrupted")
def test_interruption_of_a_comparison():
    models = ["--models", f"a={HERE}:Net", f"b={HERE}:Interrupted", *DATA, "--fim_samples", "0", "--json", "x.json"]
    assert cli.main(["compare", *models, "--eps", "0.1", "0.2"]) == 130
    assert ComparisonReport.from_json("x.json").missing == ["b"]


def test_interruption_before_there_is_anything(monkeypatch, capsys):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "read_json", interrupt)
    assert cli.main(["report", "x.json"]) == 130
    assert "interrupted before there was anything to report" in capsys.readouterr().err


def test_jsonargparse_is_optional(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert cli.main(["report", "x.json"]) == 1
    assert 'pip install "lightning-robustness[cli]"' in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "compare", "report"])
def test_help_names_every_option_and_no_address(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([command, "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: lightning-robustness {command} ")
    assert "--html" in text
    assert " at 0x" not in text
    assert ":func:" not in text


def test_help_tells_commands_and_exit_codes(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "{evaluate,compare,report}" in text
    assert "Exit codes: 0 done, 1 the evaluation failed, 2 wrong arguments, 130 interrupted." in text

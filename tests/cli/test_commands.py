import hashlib
import json
import os
import re
import subprocess
import sys
from functools import wraps
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import __version__, cli
from lightning_robustness.attacks.registry import ATTACK_NAMES
from lightning_robustness.cli import commands
from lightning_robustness.evaluation import ComparisonReport, RobustnessReport, SweepReport, evaluate, sweep
from lightning_robustness.input_space import InputSpace
from tests.cli.checkpoint_models import Composed, Data, Net, ValidationData
from tests.evaluation.reports.reports import make_full_report, make_report, make_sweep

HERE = "tests.cli.checkpoint_models"
MODEL = ["--model", f"{HERE}:Net", "--checkpoint", "net.pt"]
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


def ended(capsys, *arguments, code=2):
    """What a command that ends by itself has written: its output, or its error if the code is not 0."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(list(arguments))
    assert exit_info.value.code == code
    shown = capsys.readouterr()
    return shown.err if code else shown.out


def report_of(command, text, *arguments, code=0):
    """Run a command, with arguments as they are and options in a line, and read the report that it writes."""
    assert cli.main([command, *arguments, *text.split(), "--json", "x.json"]) == code
    kinds = {"evaluate": RobustnessReport, "sweep": SweepReport, "compare": ComparisonReport}
    return kinds[command].from_json("x.json")


def test_evaluate_is_that_of_the_package(checkpoint, capsys):
    text = "--attacks fgsm pgd --eps 1/10 --attack_samples 20 --sweep_budgets 0.05 1/10 --html x.html"
    report = report_of("evaluate", text, *MODEL, *DATA)
    options = {"eps": 0.1, "attack_samples": 20, "sweep_budgets": [0.05, 0.1], "progress": False}
    expected = evaluate(checkpoint, Data().test_dataloader(), ["fgsm", "pgd"], **options)
    assert report.rates == expected.rates
    assert report.sweep.values["accuracy"] == expected.sweep.values["accuracy"]
    assert str(report) == capsys.readouterr().out.rstrip("\n")
    assert "<h1>Robustness of Net</h1>" in Path("x.html").read_text()


def test_options_of_the_input_space_and_the_data(checkpoint):
    space = "--input_space.mean 0 --input_space.std 0.5 --input_space.high 0.5"
    arguments = ["--data_args", "{number: 30}", "--model_args", "{width: 4}"]
    report = report_of("evaluate", f"--attacks --eps null --roby_p .inf --split val {space}", *MODEL, *DATA, *arguments)
    assert report.metrics["samples"] == 15
    assert report.settings["RDI and ROBY"].endswith("ROBY in linf")
    assert "boundary_acc" not in report.metrics  # which needs a budget
    assert report.settings["input space"] == "InputSpace(low=0.0, high=0.5, mean=0.0, std=0.5)"
    assert report.rates == {}


def test_options_from_a_file(checkpoint):
    config = {"model": f"{HERE}:Net", "checkpoint": "net.pt", "data": f"{HERE}:Data", "attacks": ["fgsm"], "eps": 0.1}
    Path("config.yaml").write_text(json.dumps(config))
    assert list(report_of("evaluate", "--config config.yaml --progress false").rates) == ["fgsm", "worst"]
    text = json.dumps(config | {"model_args": {"width": 4}, "head": "head"}) + 200 * " "  # too long for a path
    assert report_of("evaluate", "--progress false", "--config", text).settings["head"] == "head"


def test_sweep_is_that_of_the_package(checkpoint, capsys):
    text = "--attacks fgsm --budgets 0.05 1/10 --attack_samples 20 --per_sample true"
    report = report_of("sweep", text, *MODEL, *DATA)
    options = {"attack_samples": 20, "per_sample": True, "progress": False}
    expected = sweep(checkpoint, Data().test_dataloader(), ["fgsm"], [0.05, 0.1], **options)
    assert report.values["accuracy"] == expected.values["accuracy"]
    assert report.breaking_eps == expected.breaking_eps
    assert str(report) == capsys.readouterr().out.rstrip("\n")


def test_functions_by_their_paths(checkpoint):
    text = f"--attacks --forward_fn {HERE}:double --batch_fn {HERE}.swap"
    x, y = Data().test_dataloader().dataset.tensors
    accuracy = (checkpoint(2 * x.flip(1)).argmax(dim=1) == y).float().mean().item()
    assert report_of("evaluate", text, *MODEL, *DATA).metrics["acc"] == pytest.approx(accuracy)
    text = f"--attacks fgsm --budgets 0.1 --attack_samples 40 --embed_fn {HERE}:halve"
    space = InputSpace(low=None, high=None)
    expected = sweep(checkpoint, [(x / 2, y)], ["fgsm"], [0.1], input_space=space, progress=False)
    report = report_of("sweep", text, *MODEL, *DATA)
    assert report.values["accuracy"] == expected.values["accuracy"]
    assert report.clean_accuracy == expected.clean_accuracy


@pytest.fixture
def trained(monkeypatch):
    """A run of LightningCLI: its configuration, its checkpoint, and the module."""
    network = {"class_path": f"{HERE}.Net", "init_args": {"width": 6}}
    config = {
        "seed_everything": 1,
        "model": {"class_path": f"{HERE}.Composed", "init_args": {"network": network, "scale": 0.5}},
        "data": {"class_path": f"{HERE}.ValidationData", "init_args": {"number": 24}},
        "trainer": {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    lightning = LightningCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        args=["fit", "--config", "config.yaml", "--trainer.default_root_dir", "."],
        save_config_callback=None,
    )
    lightning.trainer.save_checkpoint("cli.ckpt")
    x, y = ValidationData(24).val_dataloader().dataset.tensors
    accuracy = (lightning.model.network(0.5 * x).argmax(dim=1) == y).float().mean().item()
    return config, accuracy


@pytest.mark.filterwarnings("ignore")
def test_configuration_of_lightning_cli_as_it_is(trained, capsys):
    config, accuracy = trained
    several, full = {"fit": config, "test": {}}, {**config, "optimizer": None, "ckpt_path": None}
    for content in (config, several, full):
        Path("any.yaml").write_text(yaml.safe_dump(content))
        report = report_of("evaluate", "--config any.yaml --checkpoint cli.ckpt --split val --attacks --progress false")
        assert report.model == "Composed"
        assert report.metrics["samples"] == 24
        assert report.metrics["acc"] == pytest.approx(accuracy)
    # Or by paths of classes
    text = "--checkpoint cli.ckpt --split val --attacks --progress false"
    data = ["--data", f"{HERE}.ValidationData", "--data_args", "{number: 24}"]
    report = report_of("evaluate", text, "--model", json.dumps(config["model"]), *data)
    assert report.metrics["acc"] == pytest.approx(accuracy)
    # Without the configuration, the checkpoint would have to say what to import
    targets = ["--model", f"{HERE}.Composed", *data]
    assert "`network` holds `class_path`" in ended(capsys, "evaluate", *targets, *text.split())
    report = report_of("evaluate", f"{text} --trust_checkpoint", *targets)
    assert report.metrics["acc"] == pytest.approx(accuracy)


@pytest.mark.parametrize("form", ["--config c.yaml", "--config=c.yaml"])
def test_configuration_of_a_script_with_fixed_classes(checkpoint, form):
    Path("c.yaml").write_text("trainer: {max_epochs: 3}\nmodel: {width: 4}\ndata: {number: 12}\n")
    assert report_of("evaluate", f"{form} --attacks", *MODEL, *DATA).metrics["samples"] == 12
    text = f"{form} --models a={HERE}:Net@net.pt --attacks fgsm --budgets 0.1 0.2"
    assert report_of("compare", text, *DATA).reports["a"].metrics["samples"] == 12


def test_checkpoint_with_code_in_the_current_directory(capsys):
    """End to end: what Lightning would have imported is not, and what is pickled is refused unless it is trusted."""
    Path("evil_module_of_the_command.py").write_text("open('executed', 'w')\nclass Thing:\n    pass\n")
    hyper_parameters = {
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        "network": {"class_path": "evil_module_of_the_command.Thing"},
    }
    state = Composed(Net()).state_dict()
    content = {"state_dict": state, "hyper_parameters": hyper_parameters, "pytorch-lightning_version": L.__version__}
    torch.save(content, "x.ckpt")
    arguments = ["--model", f"{HERE}:Composed", "--checkpoint", "x.ckpt", *DATA, "--attacks"]
    assert "the name of code to run: 'evil_module_of" in ended(capsys, "evaluate", *arguments)
    assert not Path("executed").exists()
    arguments += ["--model_args", json.dumps({"network": {"class_path": f"{HERE}.Net"}})]
    assert cli.main(["evaluate", *arguments]) == 0
    assert not Path("executed").exists()
    torch.save({**content, "hyper_parameters": {"scale": Path.cwd}}, "x.ckpt")
    assert "refers to getattr" in ended(capsys, "evaluate", *arguments)


def test_compare_models_and_reports(checkpoint, capsys):
    report_of("evaluate", "--sweep_budgets 0.05 0.1 --sweep_attacks fgsm --attacks", *MODEL, *DATA).to_json("a.json")
    models = ["--models", "saved=a.json", f"loaded={HERE}:Net@net.pt", f"fresh={HERE}:make_net"]
    text = "--attacks fgsm --budgets 0.05 1/10 --balance 0.08"
    report = report_of("compare", text, *models, *DATA, "--prior", "{accuracy: 2}")
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
        ([], "{evaluate,sweep,compare,report}"),
        (["evaluate", *DATA], "--model"),
        (["report"], "FILE"),
        (["evaluate", "--model", "no_such:Net", *DATA], "package.module:Name but got 'no_such:Net'"),
        (["evaluate", "--model", f"{HERE}:Net", *DATA], "pass `--checkpoint FILE`"),
        (["compare", "--models", f"a={HERE}:Net", *DATA], f"or {HERE}:Net@FILE to `compare`"),
        # Data
        (["evaluate", *MODEL, "--data", f"{HERE}:ValidationData"], "Use split='val' (--split val)"),
        (["evaluate", *MODEL, "--data", f"{HERE}:make_unlabelled_loader", "--progress", "false"], "`batch_fn=`"),
        (["compare", "--models", f"a={HERE}:Net@net.pt"], "Expected `--data` to evaluate the model 'a' on"),
        # Checks of the parser, and of the functions that the command calls
        (["evaluate", *MODEL, *DATA, "--fim_method", "best"], "fim_method"),
        (["evaluate", *MODEL, *DATA, "--eps", "1/0"], "a budget such as 0.1 or 8/255"),
        (
            ["evaluate", *MODEL, *DATA, "--forward_fn", "math:pi"],
            "On the command line: --forward_fn package.module:function",
        ),
        (["compare", "--models", f"a={HERE}:Net@net.pt", *DATA, "--prior", "{acc: 2}"], "`prior`"),
        (["compare", "--models", "net.pt"], "name=package.module:Class@checkpoint or name=report.json"),
        (["compare", "--models", *[f"a={HERE}:Net@net.pt"] * 2, *DATA], "but got 'a' twice"),
        # Files
        (["evaluate", *MODEL, *DATA, "--json", "none/x.json"], "in a directory that exists but got none/x.json"),
        (["report", "x.json", "--html", "."], "directory that exists but got ."),
        (["evaluate", "--config", "junk.yaml"], "`--config` to be a YAML file but junk.yaml"),
        (["evaluate", "--config", "notes.txt"], "`--config` to be a YAML file with options but notes.txt"),
        (["report", "kind.json"], "in kind.json but got ['SweepReport']"),
        (["report", "empty.json"], "RobustnessReport, ComparisonReport, SweepReport in empty.json but got None"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments, message, checkpoint, capsys):
    Path("notes.txt").write_text("epoch 3, loss 0.1")
    Path("junk.yaml").write_bytes(b"\xff\x00: [")
    Path("kind.json").write_text('{"kind": ["SweepReport"]}')
    Path("empty.json").write_text("{}")
    error = ended(capsys, *arguments)
    assert message in error.partition("error:")[2]  # after the usage
    if arguments:
        assert f"usage: lightning-robustness {arguments[0]} " in error
    assert "evaluate." not in error


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = ended(capsys, "evaluate", *MODEL, *DATA, "--html", "x.html")
    assert 'pip install "lightning-robustness[plot]"' in error
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert cli.main(["report", "x.json"]) == 1
    assert 'pip install "lightning-robustness[cli]"' in capsys.readouterr().err


def test_failed_evaluation_exits_with_1(capsys):
    arguments = ["evaluate", "--model", f"{HERE}:make_fragile", *DATA]
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert "lightning-robustness: RuntimeError: " in error
    assert "out of order" in error
    assert "Traceback" not in error
    assert cli.main(["--traceback", *arguments]) == 1
    assert "Traceback" in capsys.readouterr().err
    wrong = ["evaluate", *MODEL, "--data", f"{HERE}:make_nothing"]
    assert "Traceback" not in ended(capsys, *wrong)
    assert "Traceback" in ended(capsys, "--traceback", *wrong)


@pytest.mark.filterwarnings("ignore:The .* was interrupted")
def test_interruption_exits_with_130_and_writes_what_there_is(checkpoint, monkeypatch, capsys):
    report = report_of("evaluate", f"--model {HERE}:make_interrupted --attacks pgd", *DATA, code=130)
    assert report.interrupted == "the Fisher information"
    assert report.metrics["samples"] == 40
    assert "Note: The run was interrupted while it measured the Fisher information" in capsys.readouterr().out
    models = ["--models", f"a={HERE}:Net@net.pt", f"b={HERE}:make_interrupted"]
    assert report_of("compare", "--fim_samples 0 --budgets 0.1 0.2", *models, *DATA, code=130).missing == ["b"]

    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "read_json", interrupt)
    assert cli.main(["report", "x.json"]) == 130
    assert "interrupted before there was anything to report" in capsys.readouterr().err


def test_help_version_and_attacks(capsys):
    for command in ("evaluate", "sweep", "compare", "report"):
        text = ended(capsys, command, "--help", code=0)
        assert text.startswith(f"usage: lightning-robustness {command} ")
        assert "--html" in text
        assert not re.search(" at 0x|:func:", text)
    text = " ".join(ended(capsys, "--help", code=0).split())
    assert "{evaluate,sweep,compare,report}" in text
    assert "Exit codes: 0 done, 1 " in text
    assert ended(capsys, "--version", code=0).strip() == f"lightning-robustness {__version__}"
    lines = [line.split(maxsplit=2) for line in ended(capsys, "--list_attacks", code=0).splitlines()]
    assert tuple(dict.fromkeys(line[0] for line in lines)) == (*ATTACK_NAMES, "torchattacks:NAME")
    assert ["cw", "fast", "C&W from a DDN start, 16 + 2 steps"] in lines
    assert [line[1:] for line in lines if line[0] == "square"] == [
        ["fast", "at most 100 queries"],
        ["strong", "at most 1000 queries"],
        ["paper", "at most 5000 queries, as published"],
    ]


@pytest.mark.parametrize(("options", "code", "output"), [(["--help"], 0, "usage"), (["--version"], 0, ""), ([], 2, "")])
def test_package_is_a_command_whose_help_imports_nothing_heavy(options, code, output):
    script = (
        "import runpy, sys\n"
        "try:\n    runpy.run_module('lightning_robustness', run_name='__main__')\n"
        "finally:\n    sys.stderr.write(str({'torch', 'lightning', 'torchmetrics', 'numpy'} & sys.modules.keys()))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    command = [sys.executable, "-c", script, *options]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == code
    assert result.stdout.startswith(output)
    assert result.stderr.endswith("set()")


def test_reports_know_checkpoint_and_command(checkpoint):
    model, sha256 = ["--model", f"{HERE}:Net"], hashlib.sha256(Path("net.pt").read_bytes()).hexdigest()
    text = f"--checkpoint {Path('net.pt').absolute()} --attacks fgsm --attack_samples 8 --seed 3 --fim_samples 0"
    provenance = report_of("evaluate", text, *model, *DATA).provenance
    assert (provenance["checkpoint"], provenance["checkpoint SHA-256"]) == ("net.pt", sha256)
    assert (provenance["data module"], provenance["seed"]) == (f"{HERE}:Data, test", "3")
    assert provenance["command"].startswith(f"lightning-robustness evaluate --model {HERE}:Net --data ")
    assert " --checkpoint net.pt " in provenance["command"]
    assert str(Path.cwd()) not in Path("x.json").read_text()
    text = f"--model {HERE}:make_net --attacks fgsm --budgets 0.1 0.2 --attack_samples 8"
    provenance = report_of("sweep", text, *DATA).provenance
    assert provenance["checkpoint"] == "none"
    assert provenance["command"].startswith("lightning-robustness sweep")


def test_compare_sorts_at_a_budget(checkpoint, capsys):
    models = ["--models", f"loaded={HERE}:Net@net.pt", f"fresh={HERE}:make_net", *DATA]
    text = "--attacks fgsm --budgets 2/255 4/255 8/255 --html c.html --rank_budget"
    report = report_of("compare", f"{text} 8/255", *models)
    assert report.rank_budget == 8 / 255
    assert report.reports["loaded"].provenance["checkpoint"] == "net.pt"
    assert report.reports["fresh"].provenance["checkpoint"] == "none"
    assert hashlib.sha256(Path("net.pt").read_bytes()).hexdigest() in Path("c.html").read_text()
    assert "robust at 8/255" in capsys.readouterr().out
    error = ended(capsys, "compare", *models, *text.split(), "16/255")
    assert "to be one of the sweep, 2/255, 4/255, 8/255" in error


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("Pass `InputSpace(high=255)`.", "--input_space.high 255"),
        ("Pass a `forward_fn=` that returns logits.", "--forward_fn package.module:function"),
        ("Measure without them: `attacks=()`", "--attacks"),
        ("Leave `num_classes` out, or pass `strength='paper'`.", "--num_classes, --strength paper"),
        ("Expected `sweep_attacks=[]` but got a high value of `fim_samples`", "--sweep_attacks, --fim_samples"),
        ("Pass `input_space=InputSpace(low=None, high=None)`.", "--input_space.low null, --input_space.high null"),
        ("Declare it in `input_space`.", "--input_space.low, --input_space.high"),
        ("`forward_fn=lambda m, x: m(x).logit(eps=1e-6)`.", "--forward_fn package.module:function"),
        ("Pass `eps=1e-3` but not `PGD(eps=0.1, alpha=f(eps=2))`.", "--eps 1e-3"),
        ("Pass `attacks={'a': PGD()}`.", "--attacks"),
        ("Expected `eps` to be at most 1. Change `sweep_budgets`.", "--sweep_budgets"),
    ],
)
def test_remedies_name_the_options_of_the_command(checkpoint, monkeypatch, capsys, message, flags):
    def fail(*arguments, **options):
        raise ValueError(message)

    monkeypatch.setattr(commands, "evaluate", wraps(evaluate)(fail))
    assert f"On the command line: {flags}\n" in ended(capsys, "evaluate", *MODEL, *DATA)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ("--budgets 1e-30 0.1", "--budgets"),
        ("--budgets 0.2 0.1", "--budgets"),
        ("--budgets 0.1 2", "--input_space.low, --input_space.high, --budgets"),
        ("--budgets 0.1 --attacks cw", "--attacks"),
    ],
)
def test_a_wrong_budget_of_a_sweep_is_one_of_budgets(checkpoint, capsys, options, flags):
    error = ended(capsys, "sweep", *MODEL, *DATA, *options.split())
    assert error.partition("On the command line: ")[2].strip() == flags


def test_warnings_name_the_options_of_the_command(checkpoint):
    command = [sys.executable, "-m", "lightning_robustness", "evaluate", *DATA]
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    command += ["--model", f"{HERE}:make_whole", "--attacks", "--fim_samples", "4", "--data_args", "{dtype: uint8}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    warning = " ".join(done.stderr.split())
    assert "Inputs are integers" in warning
    assert "On the command line: --embed_fn package.module:function, --input_space.high 255" in warning
    done = subprocess.run([*command, "--input_space.high", "255"], capture_output=True, text=True, env=environment)
    assert "Inputs are integers" not in done.stderr
    assert "Fisher information" in done.stdout


@pytest.mark.parametrize(
    ("text", "budget"), [("25.5/255", 0.1), ("8/255", 8 / 255), ("8 / 255", 8 / 255), ("1e-1", 0.1)]
)
def test_budgets_are_numbers_or_fractions(checkpoint, text, budget):
    arguments = ["--eps", text, "--attacks", "fgsm", "--attack_samples", "8", "--fim_samples", "0"]
    report = report_of("evaluate", "", *MODEL, *DATA, *arguments)
    assert report.threat_model.attacks["fgsm"].budgets == {"linf": budget}


@pytest.mark.parametrize("text", ["8/", "/255", "1/2/3", "8/0", "much"])
def test_texts_that_are_no_budgets(checkpoint, capsys, text):
    assert f"a budget such as 0.1 or 8/255 but got {text!r}" in ended(capsys, "evaluate", *MODEL, *DATA, "--eps", text)


def test_a_remedy_of_the_command_line_works(checkpoint, capsys, monkeypatch):
    loader = Data._loader

    def load(self, number):
        x, y = loader(self, number).dataset.tensors
        return DataLoader(TensorDataset(255 * x, y), batch_size=16)

    monkeypatch.setattr(Data, "_loader", load)
    message = ended(capsys, "evaluate", *MODEL, *DATA, "--attacks", "--fim_samples", "4")
    flags = message.partition("On the command line: ")[2].partition(",")[0].split()
    assert flags == ["--input_space.high", "255"]
    assert cli.main(["evaluate", *MODEL, *DATA, "--attacks", "--fim_samples", "4", *flags]) == 0

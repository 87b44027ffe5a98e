import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_robustness import cli
from lightning_robustness.evaluation import ComparisonReport, RobustnessReport, SweepReport
from tests.cli.checkpoint_models import Net
from tests.evaluation.distributed_evaluation import without_times

HERE = "tests.cli.checkpoint_models"
ROOT = Path(__file__).parents[2]
DATA = ["--data", f"{HERE}:Data", "--progress", "false"]
EVALUATE = ["evaluate", "--model", f"{HERE}:Net", "--checkpoint", "net.pt", *DATA, "--eps", "0.1"]
EVALUATE += ["--attack_samples", "20"]
ATTACKS = ["--attacks", "fgsm", "pgd", "--sweep_budgets", "0.05", "0.1", "--per_sample", "true"]


@pytest.fixture(autouse=True)
def _directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    torch.manual_seed(1)
    torch.save(Net().state_dict(), "net.pt")


def run(*arguments, **options):
    command = [sys.executable, "-m", "lightning_robustness", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


def read(path):
    return {
        name: part for name, part in without_times(RobustnessReport.from_json(path)).items() if name != "provenance"
    }


def test_two_devices_give_the_report_of_one():
    assert cli.main([*EVALUATE, *ATTACKS, "--json", "one.json"]) == 0
    done = run(*EVALUATE, *ATTACKS, "--json", "two.json", "--devices", "2", "--accelerator", "cpu")
    assert done.returncode == 0, done.stderr
    assert "Starting with 2 processes" in done.stderr
    # The first process alone prints
    assert done.stdout == f"{RobustnessReport.from_json('two.json')}\n"
    one, two = read("one.json"), read("two.json")
    for name in ("rates", "settings", "num_classes", "signs"):
        assert two[name] == one[name], name
    assert two["sweep"]["values"]["accuracy"] == one["sweep"]["values"]["accuracy"]
    assert two["per_sample"]["index"] == one["per_sample"]["index"]
    assert two["per_sample"]["adv_preds/pgd"] == one["per_sample"]["adv_preds/pgd"]
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-5)


@pytest.mark.slow
def test_a_process_that_fails_ends_the_command_with_its_error():
    Path("broken.py").write_text(
        "import os\n"
        "def forward(model, x):\n"
        "    if os.environ.get('LOCAL_RANK') == '1' and len(x) == 7:\n"
        "        raise OSError('the cable is loose')\n"
        "    return model(x)\n"
    )
    arguments = ["--forward_fn", "broken:forward", "--devices", "2", "--accelerator", "cpu", "--json", "x.json"]
    done = run(*EVALUATE, "--attacks", "pgd", "--batch_size", "7", *arguments)
    assert done.returncode == 1
    assert "Process 1 of 2 failed. OSError: the cable is loose" in done.stderr
    assert done.stdout == ""
    assert not Path("x.json").exists()


def test_one_device_by_fabric():
    assert cli.main([*EVALUATE, *ATTACKS, "--json", "plain.json"]) == 0
    options = ["--devices", "1", "--accelerator", "cpu", "--precision", "32-true"]
    assert cli.main([*EVALUATE, *ATTACKS, *options, "--json", "fabric.json"]) == 0
    assert read("fabric.json") == read("plain.json")
    sweep = ["sweep", *EVALUATE[1:-4], "--attacks", "fgsm", "--budgets", "0.05", "0.1", *options]
    assert cli.main([*sweep, "--json", "sweep.json", "--resume", "folder"]) == 0
    assert SweepReport.from_json("sweep.json").samples == 40
    assert list(Path("folder").glob("sweep*.pt"))


@pytest.mark.filterwarnings("ignore:'second' could not be measured")
def test_a_model_that_fails_is_named_and_the_code_says_so(capsys):
    models = ["--models", f"first={HERE}:Net@net.pt", f"second={HERE}:make_fragile"]
    options = ["--attacks", "fgsm", "--budgets", "0.05", "0.1", "--json", "x.json"]
    assert cli.main(["compare", *models, *DATA, *options, "--resume", "folder"]) == 1
    report = ComparisonReport.from_json("x.json")
    assert list(report.reports) == ["first"]
    assert "out of order" in report.failed["second"]
    assert "second is left out: it could not be measured." in capsys.readouterr().out
    assert len(list(Path("folder").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--devices", "2"], "Leave out --device."),
        (["--accelerator", "abacus"], "Expected --accelerator"),
        (["--strategy", "luck", "--devices", "2"], "Expected --strategy, --devices"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*EVALUATE, *arguments])
    assert exit_info.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())

from pathlib import Path

import pytest
import torch
import yaml

from tests.references import rdi

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = EXAMPLES / "lightning_cli" / "config.yaml"


def test_everything_is_configured_from_yaml(run_example, logged, tmp_path):
    names, _ = run_example(
        *("lightning_cli/main.py", "fit", "--config", str(CONFIG)),
        *("--trainer.max_epochs", "4", "--trainer.enable_progress_bar", "false"),
    )
    attacked = {name: logged(f"robustness/adv_acc/{name}") for name in ("fgsm", "square", "pgd", "worst")}
    steps = list(logged("robustness/rdi"))
    assert all(list(values) == [steps[0], steps[3]] for values in attacked.values())
    assert all(attacked["worst"][step] <= min(values[step] for values in attacked.values()) for step in attacked["pgd"])
    assert logged("robustness_details/skipped") == dict.fromkeys(steps, 0.0)

    checkpoint = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=False)
    kept = steps[checkpoint["epoch"]]
    assert attacked["worst"][kept] >= max(attacked["worst"].values()) - 0.005

    data, model = names["Digits"](), names["DigitsClassifier"](width=128)
    data.setup("fit")
    model.load_state_dict(checkpoint["state_dict"])
    with torch.no_grad():
        logits = torch.cat([model(images) for images, _ in data.val_dataloader()])
    assert logged("robustness/rdi")[kept] == pytest.approx(rdi(logits, logits.argmax(dim=1))["rdi"], abs=1e-5)


def test_the_configuration_is_printed_with_all_values(run_example, capsys):
    with pytest.raises(SystemExit, match="0"):
        run_example("lightning_cli/main.py", "fit", "--config", str(CONFIG), "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]
    written = yaml.safe_load(CONFIG.read_text())["trainer"]["callbacks"]
    assert [callback["class_path"] for callback in printed] == [callback["class_path"] for callback in written]
    monitor, expected = printed[0]["init_args"], written[0]["init_args"]
    assert monitor["attacks"][:2] == expected["attacks"][:2]
    pgd, expected_pgd = monitor["attacks"][2]["init_args"], expected["attacks"][2]["init_args"]
    assert pgd.items() >= expected_pgd.items()
    assert monitor["input_space"] == {"low": 0.0, "high": 1.0, **expected["input_space"]}
    assert monitor["fim_samples"] == 256


def test_help_shows_the_options(run_example, capsys):
    with pytest.raises(SystemExit, match="0"):
        run_example(
            "lightning_cli/main.py", "fit", "--trainer.callbacks.help", "lightning_robustness.RobustnessMonitor"
        )
    text = " ".join(capsys.readouterr().out.split())
    assert "Attack in the first validation epoch" in text

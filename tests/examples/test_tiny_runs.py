import re

import pytest
import torch


@pytest.mark.filterwarnings("ignore:Only one class was predicted")  # they are random
@pytest.mark.parametrize(
    ("name", "library", "weight", "shape"),
    [
        ("cifar10_resnet18", "torch", "network.0.weight", (4, 3, 3, 3)),
        ("huggingface_vit", "transformers", "model.classifier.weight", (10, 32)),
        ("timm_model", "timm", "model.fc.weight", (10,)),
    ],
)
def test_a_tiny_run_keeps_its_epoch(run_example, logged, name, library, weight, shape):
    pytest.importorskip(library, exc_type=ImportError)
    _, output = run_example(f"{name}.py", "--tiny")
    path = re.search(r"The most robust epoch is in (.+)", output).group(1)
    assert torch.load(path, weights_only=True)["state_dict"][weight].shape[: len(shape)] == shape
    values = [logged(f"robustness/{key}") for key in ("adv_acc/pgd", "rdi", "acc")]
    assert values[0].keys() == values[1].keys()
    assert all(0 <= value <= 1 for found in (values[0], values[2]) for value in found.values())
    assert name == "huggingface_vit" or "adversarial_training/adv_acc" in logged()["scalars"]

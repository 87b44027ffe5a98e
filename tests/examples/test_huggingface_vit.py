import re

import pytest
import torch

pytest.importorskip("transformers", reason="needs Hugging Face transformers")


@pytest.mark.filterwarnings("ignore:Only one class was predicted")  # they are random
def test_a_tiny_run_keeps_its_epoch(run_example, logged):
    _, output = run_example("huggingface_vit.py", "--tiny")
    path = re.search(r"The most robust epoch is in (.+)", output).group(1)
    weights = torch.load(path, weights_only=True)["state_dict"]
    assert weights["model.classifier.weight"].shape == (10, 32)
    assert logged("robustness/adv_acc/pgd").keys() == logged("robustness/rdi").keys()

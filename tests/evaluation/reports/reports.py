"""Reports with made-up numbers."""

import torch

from lightning_robustness._measurement.assisted import BoundaryCurve
from lightning_robustness._measurement.threat_model import AttackFacts, ThreatModel
from lightning_robustness.attacks import MaskingSign
from lightning_robustness.evaluation import RobustnessReport, SweepReport
from lightning_robustness.evaluation.decision_space import DecisionSpace

ATTACKS = ["fgsm", "pgd"]
EPS = [0.1, 0.2, 0.3]
FACTS = {"pgd": AttackFacts({"linf": 0.2}, "10 steps", queries=9.5), "cw": AttackFacts({}, "", l2_budget=0.5)}


def make_sweep(seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(5, len(ATTACKS), len(EPS), generator=generator, dtype=torch.float64)
    values = dict(zip(("accuracy", "ssim", "psnr", "mse", "ald2"), table.tolist(), strict=True))
    worst = table[0].amin(dim=0).tolist()
    fields = {
        "attacks": list(ATTACKS),
        "budgets": list(EPS),
        "values": values,
        "worst": worst,
        "clean_accuracy": 0.9,
        "samples": 100,
        "seconds": {"fgsm": 1.0, "pgd": 2.0},
    }
    return SweepReport(**fields | changes)


def make_report(seed=0, **changes):
    generator = torch.Generator().manual_seed(seed + 100)
    names = ("acc", "rdi", "roby", "fim", "lipschitz", "seconds/features")
    parts = ("asr", "asr_low", "asr_high", "error_rate", "adv_acc", "distortion")
    rate = dict(zip(parts, torch.rand(6, generator=generator).tolist(), strict=True)) | {"correct": 9, "count": 10}
    rate |= {"adv_acc_low": 0.9 * rate["adv_acc"], "adv_acc_high": 1.0}
    fields = {
        "model": "Network",
        "num_classes": 10,
        "metrics": dict(zip(names, torch.rand(6, generator=generator).tolist(), strict=True)),
        "rates": {"pgd": rate, "worst": rate},
        "settings": {"seed": "0"},
        "sweep": make_sweep(seed),
    }
    return RobustnessReport(**fields | changes)


def make_full_report():
    """A report with everything that it can have."""
    return make_report(
        signs=[MaskingSign("zero_gradients", "evidence <b>", "explanation", "remedy")],
        interrupted="the decision space",
        per_sample={"y": [0, 1], "l2/pgd": [0.5, 0.25]},
        decision_space=DecisionSpace("PCA", "pgd", [0, 1], [[0.0, 1.0], [1.0, 0.0]], [[0.5, 0.5], [0.0, 0.25]]),
        threat_model=ThreatModel(
            {"pgd": AttackFacts({"linf": 0.2}, "10 steps", 9.5), "cw": AttackFacts({}, "", None, 0.5)}, 10, -1.0, None
        ),
        boundary=BoundaryCurve("linf", [0.0, 0.1, 0.2], [0.9, 0.5, 0.1], [0.8, 0.4, 0.0], [1.0, 0.6, 0.2]),
    )

"""Confidence intervals of accuracies under attack, from the values of an evaluation."""

import math
from collections.abc import Mapping

import torch

from lightning_robustness.functional.attack_success_rate import wilson_interval

_FAMILY = "adv_acc/"


def accuracy_interval(accuracy: float, number: float) -> tuple[float, float]:
    """Return the 95 % Wilson interval of an accuracy over a number of samples.

    Example:
        >>> from lightning_robustness.measurement.intervals import accuracy_interval
        >>> low, high = accuracy_interval(0.8, 10)
        >>> round(low, 4), round(high, 4)
        (0.4902, 0.9433)

    """
    successes, trials = torch.tensor([accuracy * number, number], dtype=torch.float64)
    low, high = wilson_interval(successes, trials)
    return low.item(), high.item()


def interval_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return the ends of the intervals of all accuracies under attack, by name; empty if the number is not known.

    Example:
        >>> from lightning_robustness.measurement.intervals import interval_values
        >>> values = interval_values({"adv_acc/pgd": 0.8, "samples_attacks": 10})
        >>> {name: round(value, 4) for name, value in values.items()}
        {'adv_acc_low/pgd': 0.4902, 'adv_acc_high/pgd': 0.9433}

    """
    ends: dict[str, float] = {}
    number = values.get("samples_attacks", math.nan)
    for name, accuracy in values.items():
        if name.startswith(_FAMILY) and not math.isnan(number + accuracy):
            member = name.removeprefix(_FAMILY)
            ends[f"adv_acc_low/{member}"], ends[f"adv_acc_high/{member}"] = accuracy_interval(accuracy, number)
    return ends

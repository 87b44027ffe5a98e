from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_robustness.measurement.meter import SampleMeter
from lightning_robustness.metrics.class_statistics import Mode
from lightning_robustness.utilities.input_space import InputSpace


def describe_settings(
    attacks: Mapping[str, Callable[..., Any]],
    attack_samples: int,
    meters: Iterable[SampleMeter],
    mode: Mode,
    input_space: InputSpace,
    seed: int,
) -> dict[str, str]:
    """Describe the settings that values depend on besides the model and the data."""
    return {
        "attacks": "; ".join(f"{name}: {attack!r}" for name, attack in attacks.items()) or "none",
        "attacked": f"at most {attack_samples} samples" if attacks else "none",
        **{meter.title: meter.describe() if meter.size else "none" for meter in meters},
        "RDI and ROBY": f"all samples, mode {mode!r}",
        "input space": repr(input_space),
        "seed": str(seed),
    }

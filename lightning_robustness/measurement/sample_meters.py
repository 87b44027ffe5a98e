from lightning_robustness.functional.fisher_spectral_norm import FisherMethod
from lightning_robustness.measurement.clever_meter import CleverMeter
from lightning_robustness.measurement.fisher_meter import FisherMeter
from lightning_robustness.measurement.meter import SampleMeter
from lightning_robustness.utilities.checks import check_integer, check_number, check_option
from lightning_robustness.utilities.input_space import InputSpace


def make_sample_meters(
    input_space: InputSpace,
    seed: int = 0,
    fim_samples: int = 256,
    fim_method: FisherMethod = "auto",
    clever_samples: int = 0,
    clever_radius: float = 2.0,
) -> list[SampleMeter]:
    """Make the meters of a fixed sample, in the order in which they run; those of size 0 are not to be used.

    Raises:
        ValueError: If an argument is out of range.

    """
    for name, value in {"fim_samples": fim_samples, "clever_samples": clever_samples, "seed": seed}.items():
        check_integer(name, value, minimum=0)
    check_option("fim_method", fim_method, FisherMethod)
    check_number("clever_radius", clever_radius, exclusive=True)
    return [
        FisherMeter(fim_samples, fim_method, input_space, seed),
        CleverMeter(clever_samples, clever_radius, input_space, seed),
    ]

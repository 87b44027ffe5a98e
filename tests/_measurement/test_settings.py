from lightning_robustness._measurement.plan import describe_settings, make_sample_meters
from lightning_robustness.attacks import Budget, Square
from lightning_robustness.input_space import InputSpace


def test_everything_that_values_depend_on_is_described():
    space = InputSpace(mean=0.5)
    meters = make_sample_meters(space, seed=3, fim_samples=64, fim_method="lanczos", budget=Budget("linf", 0.1))
    assert describe_settings({"mine": Square(eps=0.1)}, 32, meters, "exact", space, seed=3) == {
        "attacks": "mine: Square(eps=0.1, num_queries=5000, norm='linf', p=0.8, loss='margin')",
        "attacked": "at most 32 samples",
        "Fisher information": "at most 64 samples, method 'lanczos', boundary in linf, eps 0.1",
        "CLEVER": "none",
        "RDI and ROBY": "all samples, mode 'exact'",
        "input space": "InputSpace(low=0.0, high=1.0, mean=0.5, std=None)",
        "seed": "3",
    }
    assert describe_settings({}, 32, [], "exact", space, seed=3)["attacked"] == "none"

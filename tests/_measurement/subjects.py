import torch

from lightning_robustness._measurement.findings import conclude
from lightning_robustness._measurement.meters import measure
from lightning_robustness._measurement.plan import Plan
from lightning_robustness._measurement.samples import Samples
from lightning_robustness._measurement.subject import Subject
from lightning_robustness._model.access import Access
from lightning_robustness._processes import Processes
from lightning_robustness.attacks import run_attack
from lightning_robustness.input_space import InputSpace

CPU = torch.device("cpu")


def subject(model, space=None, **options):
    """A model on the CPU."""
    return Subject(model, Access(space), model, CPU, **options)


def samples(x, y=None, first=0):
    """Samples at positions from the first on."""
    return Samples(x, y, first + torch.arange(len(x)))


def rows_of(meter, model, x, y=None, space=None, first=0, **options):
    """Rows of all processes that a meter measures."""
    return measure(meter, subject(model, space, **options), samples(x, y, first), Processes())


def make_plan(attacks=None, **changes):
    """A plan of attacks alone, with other settings on top."""
    settings = {
        "input_space": InputSpace(),
        "attack_samples": 512,
        "fim_samples": 0,
        "fim_method": "auto",
        "clever_samples": 0,
        "clever_radius": 2.0,
        "budget": None,
        "minimum_norm_budget": None,
        "storage": "exact",
        "batch_size": 128,
        "seed": 0,
    }
    return Plan(attacks or {}, **{**settings, **changes})


def findings_of(plan, model, x, y, first=0, **options):
    """What all attacks of a plan say about samples."""
    meters = plan.attack_meters()
    rows = {meter.name: rows_of(meter, model, x, y, plan.input_space, first, **options) for meter in meters}
    return conclude(plan, None, rows)


RESULTS = ("preds", "adv_preds", "eligible", "success", "l2", "linf", "queries", "x_adv")


def attack_by_hand(model, attack, x, y, batch_size=128, space=None, seed=0):
    """What ``run_attack`` does to each batch, one array for each thing that it tells."""
    positions = torch.arange(len(x)).split(batch_size)
    results = [
        run_attack(model, attack, x[rows], y[rows], input_space=space, seed=seed, positions=rows) for rows in positions
    ]
    return {name: torch.cat([getattr(result, name) for result in results]).numpy() for name in RESULTS}


def untouched(model, x, y):
    """An attack without a budget that changes nothing."""
    return x

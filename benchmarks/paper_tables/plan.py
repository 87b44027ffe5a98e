"""The networks: which architectures are trained in which ways."""

from collections.abc import Callable
from dataclasses import dataclass

from architectures import ARCHITECTURES
from lightning import Callback

from lightning_robustness import AdversarialTraining, AttackFreeRegularization
from lightning_robustness.attacks import MinimumNormCW

# Budget of training and of the strong verdict, in the l-infinity norm
EPS = {"mnist": 0.1, "fashion-mnist": 0.1, "cifar10": 8 / 255}
# The architecture that is trained in all ways, and over several seeds
BASE = "alexnet"
CONVOLUTIONAL = ("alexnet", "vit", "resnet", "vgg", "resnet-deep", "densenet", "mobilenet")
SEEDS = (0, 1, 2)
STEPS = 5


def _pgd(factor: float) -> Callable[[float], Callback]:
    # Budgets above that of the verdict are reached epoch by epoch: training at once against all of it often fails
    factors = [factor] if factor <= 1 else [1.0, factor]
    return lambda eps: AdversarialTraining("pgd", eps=[scale * eps for scale in factors], steps=STEPS)


TRAININGS: dict[str, Callable[[float], Callback] | None] = {
    "natural": None,
    "pgd": _pgd(1.0),
    "pgd-half": _pgd(0.5),
    "pgd-double": _pgd(2.0),
    "pgd-triple": _pgd(3.0),
    "fast": lambda eps: AdversarialTraining("fast", eps=eps),
    "trades": lambda eps: AdversarialTraining(loss="trades", eps=eps, alpha=eps / 4, steps=10),
    "cw": lambda eps: AdversarialTraining(MinimumNormCW(steps=STEPS, initial_steps=STEPS)),
    "free-rdi": lambda eps: AttackFreeRegularization(rdi=1.0, fisher=0.0),
    "free-fisher": lambda eps: AttackFreeRegularization(rdi=0.0, fisher=0.1),
    "free-boundary": lambda eps: AttackFreeRegularization(rdi=0.0, fisher=0.0, boundary=1.0, boundary_margin=eps),
}


@dataclass(frozen=True)
class Network:
    """A network of the plan."""

    architecture: str
    training: str = "natural"
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of its checkpoint, and of its results."""
        return f"{self.architecture}.{self.training}.{self.seed}"

    @property
    def is_robust(self) -> bool:
        """Whether it is trained with the aim of robustness."""
        return self.training != "natural"


def plan() -> list[Network]:
    """List all networks, those first that most tables need."""
    networks = [Network(architecture) for architecture in ARCHITECTURES]
    networks += [Network(BASE, training) for training in TRAININGS if training not in ("natural", "cw")]
    networks += [Network(BASE, training, seed) for seed in SEEDS for training in ("natural", "pgd")]
    networks += [Network(architecture, "pgd") for architecture in ("fc-2x500", *CONVOLUTIONAL)]
    networks.append(Network("resnet", "cw"))
    return list(dict.fromkeys(networks))

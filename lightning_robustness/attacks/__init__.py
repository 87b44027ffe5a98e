from lightning_robustness.attacks.adapters.autoattack import AutoAttackAdapter
from lightning_robustness.attacks.adapters.torchattacks import TorchattacksAdapter
from lightning_robustness.attacks.attack import Attack, Budget, Cascade, budget_of
from lightning_robustness.attacks.cw import CW, MinimumNormCW
from lightning_robustness.attacks.ddn import DDN
from lightning_robustness.attacks.fisher_step import FisherStep
from lightning_robustness.attacks.masking import MaskingSign, masking_signs
from lightning_robustness.attacks.pgd import PGD
from lightning_robustness.attacks.registry import get_attack
from lightning_robustness.attacks.run_attack import AttackResult, run_attack
from lightning_robustness.attacks.siren import SirenAttack
from lightning_robustness.attacks.square import Square

__all__ = [
    "CW",
    "DDN",
    "PGD",
    "Attack",
    "AttackResult",
    "AutoAttackAdapter",
    "Budget",
    "Cascade",
    "FisherStep",
    "MaskingSign",
    "MinimumNormCW",
    "SirenAttack",
    "Square",
    "TorchattacksAdapter",
    "budget_of",
    "get_attack",
    "masking_signs",
    "run_attack",
]

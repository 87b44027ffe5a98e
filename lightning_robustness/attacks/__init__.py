from lightning_robustness.attacks.attack import Attack
from lightning_robustness.attacks.autoattack_adapter import AutoAttackAdapter
from lightning_robustness.attacks.budget import Budget, budget_of
from lightning_robustness.attacks.cascade import Cascade
from lightning_robustness.attacks.cw import CW, MinimumNormCW
from lightning_robustness.attacks.ddn import DDN
from lightning_robustness.attacks.masking import MaskingSign, masking_signs
from lightning_robustness.attacks.pgd import PGD
from lightning_robustness.attacks.registry import get_attack
from lightning_robustness.attacks.run import AttackResult, run
from lightning_robustness.attacks.siren import SirenAttack
from lightning_robustness.attacks.square import Square
from lightning_robustness.attacks.torchattacks_adapter import TorchattacksAdapter

__all__ = [
    "CW",
    "DDN",
    "PGD",
    "Attack",
    "AttackResult",
    "AutoAttackAdapter",
    "Budget",
    "Cascade",
    "MaskingSign",
    "MinimumNormCW",
    "SirenAttack",
    "Square",
    "TorchattacksAdapter",
    "budget_of",
    "get_attack",
    "masking_signs",
    "run",
]

from lightning_robustness.attacks.attack import Attack
from lightning_robustness.attacks.cascade import Cascade
from lightning_robustness.attacks.cw import CW
from lightning_robustness.attacks.masking import MaskingSign, masking_signs
from lightning_robustness.attacks.pgd import PGD
from lightning_robustness.attacks.registry import get_attack
from lightning_robustness.attacks.run import AttackResult, run
from lightning_robustness.attacks.siren import SirenAttack
from lightning_robustness.attacks.square import Square
from lightning_robustness.attacks.torch_attack import TorchAttack

__all__ = [
    "CW",
    "PGD",
    "Attack",
    "AttackResult",
    "Cascade",
    "MaskingSign",
    "SirenAttack",
    "Square",
    "TorchAttack",
    "get_attack",
    "masking_signs",
    "run",
]

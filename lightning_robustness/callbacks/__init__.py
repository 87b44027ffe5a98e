from lightning_robustness.callbacks.adversarial_training import AdversarialTraining
from lightning_robustness.callbacks.adversarial_weight_perturbation import AdversarialWeightPerturbation
from lightning_robustness.callbacks.attack_free_regularization import AttackFreeRegularization
from lightning_robustness.callbacks.robust_early_stopping import RobustEarlyStopping
from lightning_robustness.callbacks.robust_model_checkpoint import RobustModelCheckpoint
from lightning_robustness.callbacks.robustness_monitor import RobustnessMonitor

__all__ = [
    "AdversarialTraining",
    "AdversarialWeightPerturbation",
    "AttackFreeRegularization",
    "RobustEarlyStopping",
    "RobustModelCheckpoint",
    "RobustnessMonitor",
]

from lightning.pytorch import Trainer

from lightning_robustness.callbacks.monitor_settings import MonitorSettings
from lightning_robustness.callbacks.trainer_access import is_sharded
from lightning_robustness.utilities.rank_zero import rank_zero_warn


def warn_of_sharding(trainer: Trainer, settings: MonitorSettings) -> None:
    """Warn of what the monitor leaves out where no process has the whole network."""
    if not is_sharded(trainer):
        return
    left_out = [
        *(["attacks, with them `worst` and trust"] if settings.attacks else []),
        *(["`final_attacks`"] if settings.final else []),
        *(["the Fisher information and the distance to the decision boundary"] if settings.fim_samples else []),
        *(["CLEVER"] if settings.clever_samples else []),
        *(["the projector"] if settings.log_embeddings else []),
    ]
    functions = [name for name in ("forward_fn", "embed_fn") if getattr(settings, name) is not None]
    if not left_out and not functions:
        return
    uncalled = f" {' and '.join(functions)} will not be called: `validation_step` alone runs the network."
    rank_zero_warn(
        f"RobustnessMonitor: {type(trainer.strategy).__name__} shards the parameters, so no process can run or "
        "differentiate the network by itself. RDI, ROBY and accuracy are measured, from hooks; left out are: "
        f"{'; '.join(left_out) or 'none'}.{uncalled if functions else ''} For everything, train with strategy='ddp', "
        "or evaluate a checkpoint afterwards, with `lightning_robustness.evaluation.evaluate`."
    )

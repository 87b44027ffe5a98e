from typing import Any

from lightning.pytorch import Trainer

from lightning_robustness.callbacks.trainer_access import evaluation_loader


def find_class_names(trainer: Trainer, dataloader_idx: int, num_classes: int) -> list[str] | None:
    """Return the names of the classes, from the data module or the data set behind the evaluation loader.

    Args:
        trainer: The Trainer; its data module may have ``class_names`` or ``classes``.
        dataloader_idx: Index of the loader; its data set, or one inside of subsets, may have them too.
        num_classes: Number of classes; other numbers of names are ignored.

    Returns:
        The names, or None if nobody knows them.

    """
    loader, _ = evaluation_loader(trainer, dataloader_idx)
    owner, owners = getattr(loader, "dataset", None), [getattr(trainer, "datamodule", None)]
    while owner is not None and all(owner is not known for known in owners):
        owners.append(owner)
        owner = getattr(owner, "dataset", None)
    found = (_names(owner, attribute) for owner in owners for attribute in ("class_names", "classes"))
    return next((names for names in found if names is not None and len(names) == num_classes), None)


def _names(owner: Any, attribute: str) -> list[str] | None:
    names = getattr(owner, attribute, None)
    if isinstance(names, dict):  # by number
        names = [names[number] for number in range(len(names))] if names.keys() == set(range(len(names))) else None
    return [str(name) for name in names] if isinstance(names, (list, tuple)) else None

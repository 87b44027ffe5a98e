import warnings

import torch.distributed as dist


def rank_zero_warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 2) -> None:
    """Warn in the first process only; without ``torch.distributed`` that is every process.

    Args:
        message: The problem and its remedy.
        category: The class of the warning.
        stacklevel: Frame to which the warning is attributed, as in ``warnings.warn``, counted from the caller.

    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        warnings.warn(message, category, stacklevel=stacklevel + 1)

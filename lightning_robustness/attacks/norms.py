import torch
from torch import Tensor


def l2_norm(x: Tensor, start_dim: int = 1) -> Tensor:
    """Euclidean norm over the dimensions from one on, in a shape that broadcasts with the tensor."""
    return torch.linalg.vector_norm(x, dim=tuple(range(start_dim, x.ndim)), keepdim=True)


def nonzero(x: Tensor) -> Tensor:
    """Non-negative values that can be divided by."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)

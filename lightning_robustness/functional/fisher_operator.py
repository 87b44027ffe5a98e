"""The Fisher information of inputs as an operator, for measuring and for training."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_robustness.functional.jacobian import InputJacobian
from lightning_robustness.utilities.precision import accumulation_dtype


class FisherOperator:
    r"""Fisher information G = J^T F J of each input, with F = diag(p) - p p^T = L^T L, by its factor L J.

    L = diag(sqrt(p)) (I - 1 p^T), so the rows of L J are sqrt(p_k) grad log p_k. G, an n x n matrix, and the K x K
    matrix M = (L J)(L J)^T have the same non-zero eigenvalues. With a Jacobian that creates graphs, ``gram`` and
    ``transposed_product`` can be differentiated.

    Logits are taken relative to that of the predicted class, which changes nothing but keeps differences accurate
    where its probability rounds to one.

    Args:
        jacobian: Jacobian J of the logits.

    """

    def __init__(self, jacobian: InputJacobian) -> None:
        self._jacobian = jacobian
        self.rounding = jacobian.rounding
        log_p = jacobian.logits.to(accumulation_dtype(jacobian.logits.device)).log_softmax(dim=1)
        self.p, self.sqrt_p, self.preds = log_p.exp(), (log_p / 2).exp(), log_p.argmax(dim=1, keepdim=True)

    def gram(self) -> Tensor:
        """Compute M, shape ``(N, K, K)``, from all rows of J."""
        rows = self._jacobian.rows()
        # Rows relative to that of the predicted class, then to their mean under p: the gradients of log p_k
        rows = rows - rows.gather(1, self.preds.unsqueeze(2).expand(-1, 1, rows.shape[2]))
        gram = (rows @ rows.mT).to(self.p.dtype)
        mean = (gram @ self.p.unsqueeze(2)).squeeze(2)
        gram = gram - mean.unsqueeze(1) - mean.unsqueeze(2) + (self.p * mean).sum(dim=1)[:, None, None]
        return self.sqrt_p.unsqueeze(1) * gram * self.sqrt_p.unsqueeze(2)

    def transposed_product(self, c: Tensor) -> Tensor:
        """Compute (L J)^T c for c of shape ``(N, K)``, as a tensor of shape ``(N, n)``."""
        return self._jacobian.transposed_product(self._apply_transposed(c))

    def gram_product(self, c: Tensor) -> Tensor:
        """Compute M c for c of shape ``(N, K)``, without a graph.

        Raises:
            RuntimeError: If the model can be differentiated neither twice nor in forward mode.

        """
        w = self._jacobian.gram_product(self._apply_transposed(c))
        w = w - w.gather(1, self.preds)
        return (self.sqrt_p * (w - (self.p * w).sum(dim=1, keepdim=True))).detach()

    @torch.no_grad()
    def start(self) -> Tensor:
        """Return the unit vector c whose (L J)^T c is parallel to the gradient of log p of the predicted class.

        It is the unit vector of that class without its part along sqrt(p), which L^T maps to zero and which is nearly
        all of it for a confident prediction. It is zero, as L is, where all other probabilities underflow.
        """
        others = self.sqrt_p.scatter(1, self.preds, 0.0)
        scale = others.amax(dim=1, keepdim=True).clamp(min=torch.finfo(others.dtype).tiny)
        c = -others / scale * self.sqrt_p.gather(1, self.preds)
        return normalize(c.scatter(1, self.preds, (others.square() / scale).sum(1, keepdim=True)))

    def _apply_transposed(self, c: Tensor) -> Tensor:
        """Compute L^T c; the rows of the result sum to zero."""
        weighted = self.sqrt_p * c
        others = (weighted - self.p * weighted.sum(dim=1, keepdim=True)).scatter(1, self.preds, 0.0)
        return others.scatter(1, self.preds, -others.sum(dim=1, keepdim=True))

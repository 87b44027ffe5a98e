"""Estimators of the largest eigenvalue of G = J^T F J, with F = diag(p) - p p^T, for every sample of a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_robustness.functional.jacobian import Jacobian
from lightning_robustness.utilities.input_space import InputSpace
from lightning_robustness.utilities.logits import check_finite, compute_logits
from lightning_robustness.utilities.precision import accumulation_dtype

# Of the central differences
_STEP_SIZE = 1e-3


class FisherComponents(NamedTuple):
    """Spectral norm of the Fisher information of each sample, with what came along.

    Args:
        spectral_norm: The largest eigenvalue lambda of G, shape ``(N,)``.
        products: Products with the Jacobian, or for ``blackbox`` forward passes, that each sample took, shape ``(N,)``.
        residual: ``lanczos`` and ``power``: norm of the residual, a bound on the distance of lambda to an eigenvalue.
        trace: ``exact``: trace of G.
        jacobian_norm: ``exact``: spectral norm of the Jacobian of the logits.
        lipschitz: ``exact``: local Lipschitz constant, the largest gradient norm of a probability.

    """

    spectral_norm: Tensor
    products: Tensor
    residual: Tensor | None = None
    trace: Tensor | None = None
    jacobian_norm: Tensor | None = None
    lipschitz: Tensor | None = None


class _Root:
    r"""The factor L of the Fisher information F = diag(p) - p p^T = L^T L of the logits.

    L = diag(sqrt(p)) (I - 1 p^T). Logits are taken relative to the predicted one, which changes nothing but keeps
    differences exact where its probability rounds to one.
    """

    def __init__(self, logits: Tensor) -> None:
        log_p = logits.to(accumulation_dtype(logits.device)).log_softmax(dim=1)
        self.p, self.sqrt_p, self.preds = log_p.exp(), (log_p / 2).exp(), log_p.argmax(dim=1, keepdim=True)

    def apply(self, w: Tensor) -> Tensor:
        """Compute L w for w of shape ``(N, K)``."""
        w = w - w.gather(1, self.preds)
        return self.sqrt_p * (w - (self.p * w).sum(dim=1, keepdim=True))

    def apply_transposed(self, c: Tensor) -> Tensor:
        """Compute L^T c for c of shape ``(N, K)``, which sums to zero in each row."""
        weighted = self.sqrt_p * c
        others = (weighted - self.p * weighted.sum(dim=1, keepdim=True)).scatter(1, self.preds, 0.0)
        return others.scatter(1, self.preds, -others.sum(dim=1, keepdim=True))

    def start(self) -> Tensor:
        """Unit vector c for which J^T L^T c is parallel to the gradient of the predicted class's log p.

        That of the class itself, without its part along sqrt(p), which L^T maps to zero and which is nearly all of it
        for a confident prediction.
        """
        others = self.sqrt_p.scatter(1, self.preds, 0.0)
        scale = others.amax(dim=1, keepdim=True).clamp(min=torch.finfo(others.dtype).tiny)
        c = -others / scale * self.sqrt_p.gather(1, self.preds)
        return torch.nn.functional.normalize(c.scatter(1, self.preds, (others.square() / scale).sum(1, keepdim=True)))


def exact(jacobian: Jacobian) -> FisherComponents:
    """G = (L J)^T (L J) has the eigenvalues of the K x K matrix (L J)(L J)^T."""
    root, rows = _Root(jacobian.logits), jacobian.rows()
    gram = (rows @ rows.mT).to(root.p.dtype)
    jacobian_norm = torch.linalg.eigvalsh(gram)[:, -1].clamp(min=0).sqrt()
    # Rows relative to the one of the predicted class, then to their mean under p: the gradients q_k of log p_k
    rows = rows - rows.gather(1, root.preds.unsqueeze(2).expand(-1, 1, rows.shape[2]))
    gram = (rows @ rows.mT).to(root.p.dtype)
    mean = (gram @ root.p.unsqueeze(2)).squeeze(2)
    gram = gram - mean.unsqueeze(1) - mean.unsqueeze(2) + (root.p * mean).sum(dim=1)[:, None, None]
    squared_norms = gram.diagonal(dim1=1, dim2=2).clamp(min=0)
    eigenvalues = torch.linalg.eigvalsh(root.sqrt_p.unsqueeze(1) * gram * root.sqrt_p.unsqueeze(2))
    return FisherComponents(
        spectral_norm=eigenvalues[:, -1].clamp(min=0),
        products=torch.full_like(root.preds[:, 0], rows.shape[1]),
        trace=(root.p * squared_norms).sum(dim=1),
        jacobian_norm=jacobian_norm,
        lipschitz=(root.p * squared_norms.sqrt()).amax(dim=1),
    )


class _Result:
    """What an iteration has found for each sample up to the step at which it was done, whatever the others need."""

    def __init__(self, root: _Root) -> None:
        self.tiny = torch.finfo(root.p.dtype).tiny
        self._value, self._residual = root.p.new_zeros(len(root.p)), root.p.new_zeros(len(root.p))
        self._products = torch.zeros_like(root.preds[:, 0])

    def write(self, active: Tensor, going: Tensor, value: Tensor, residual: Tensor, products: int) -> None:
        index = active[going]
        self._value[index], self._residual[index], self._products[index] = value[going], residual[going], products

    def components(self) -> FisherComponents:
        return FisherComponents(self._value, self._products, self._residual)


def _ritz(basis: Tensor, image: Tensor, rounding: float) -> tuple[Tensor, Tensor, Tensor]:
    """Largest Ritz value of G on the span of J^T L^T C, a bound on its residual, and the gap to the next Ritz value.

    With M = (L J)(L J)^T, the products of these vectors with each other are C^T M C, and with G between them
    (M C)^T (M C), so that the image M C gives a Ritz value half a step ahead of the one on C itself.

    Args:
        basis: Orthonormal columns C, shape ``(N, K, m)``.
        image: M C, same shape.
        rounding: Relative error of the image.

    """
    gram = basis.mT @ image
    lengths, axes = torch.linalg.eigh((gram + gram.mT) / 2)
    # Shorter vectors are made of rounding errors, which dividing by their length would blow up
    enough = lengths > 10 * rounding * lengths[:, -1:]
    axes = axes * torch.where(enough, lengths, 1.0).rsqrt().mul(enough).unsqueeze(1)
    mapped = image @ axes
    values, vectors = torch.linalg.eigh(mapped.mT @ mapped)
    value, vector = values[:, -1].clamp(min=0), vectors[:, :, -1:]
    # The residual of y = J^T L^T C s is J^T L^T (M - value) C s, and that matrix has norm sqrt(||G||)
    residual = torch.linalg.vector_norm((mapped - value[:, None, None] * (basis @ axes)) @ vector, dim=(1, 2))
    gap = value - (values[:, -2] if values.shape[1] > 1 else 0.0)
    return value, value.sqrt() * residual + rounding * value, gap


def lanczos(make_jacobian: Callable[[Tensor], Jacobian], x: Tensor, tolerance: float, steps: int) -> FisherComponents:
    """Rayleigh-Ritz on the Krylov space of (L J)(L J)^T from the predicted class, with full re-orthogonalisation."""
    jacobian = make_jacobian(x)
    root = _Root(jacobian.logits)
    result = _Result(root)
    active, going = torch.arange(len(x), device=x.device), torch.ones(len(x), dtype=torch.bool, device=x.device)
    c = root.start()
    basis = image = c.new_zeros(*c.shape, 0)
    for step in range(1, min(steps, c.shape[1]) + 1):
        mapped = root.apply(jacobian.gram_product(root.apply_transposed(c)))
        basis, image = torch.cat([basis, c.unsqueeze(2)], dim=2), torch.cat([image, mapped.unsqueeze(2)], dim=2)
        value, residual, gap = _ritz(basis, image, jacobian.rounding)
        result.write(active, going, value, residual, 2 * step)
        # The error of a Ritz value is at most the residual and, once it is apart from the next, quadratic in it
        error = torch.minimum(residual, residual.square() / gap.clamp(min=result.tiny))
        for _ in range(2):
            mapped = mapped - (basis @ (basis.mT @ mapped.unsqueeze(2))).squeeze(2)
        size = torch.linalg.vector_norm(mapped, dim=1, keepdim=True)
        # One step alone may be close to a smaller eigenvalue
        going = going & ((error > tolerance * value) | (step == 1)) & (size.squeeze(1) > jacobian.rounding * value)
        if not going.any():
            break
        c = mapped / size.clamp(min=result.tiny)
        if 2 * going.sum() <= len(active):  # a new graph for the rest is cheaper than products for all
            active, c, basis, image = active[going], c[going], basis[going], image[going]
            going = going[going]
            jacobian = make_jacobian(x[active])
            root = _Root(jacobian.logits)
    return result.components()


def power(jacobian: Jacobian, tolerance: float, steps: int) -> FisherComponents:
    """Power iteration from the predicted class."""
    root = _Root(jacobian.logits)
    result = _Result(root)
    c, value, change = root.start(), root.p.new_zeros(len(root.p)), root.p.new_zeros(len(root.p))
    everything, going = torch.arange(len(c), device=c.device), torch.ones(len(c), dtype=torch.bool, device=c.device)
    for step in range(1, steps + 1):
        mapped = root.apply(jacobian.gram_product(root.apply_transposed(c)))
        previous_value, previous_change = value, change
        value = (c * mapped).sum(dim=1).clamp(min=0)
        residual = torch.linalg.vector_norm(mapped - value.unsqueeze(1) * c, dim=1)
        result.write(everything, going, value, residual, 2 * step)
        # Changes shrink geometrically, so that what is left to go is the sum of a series
        change = (value - previous_value).abs()
        ratio = (change / previous_change.clamp(min=result.tiny)).clamp(max=0.999)
        if step > 2:
            going = going & (change * ratio / (1 - ratio) > 0.1 * tolerance * value)
        if not going.any():
            break
        size = torch.linalg.vector_norm(mapped, dim=1, keepdim=True)
        c = torch.where(size > 0, mapped / size.clamp(min=result.tiny), c)
    return result.components()


def _directions(number: int, shape: tuple[int, ...], like: Tensor, seed: int) -> Tensor:
    """Gaussian vectors that depend on the seed alone, so that all batches on all devices get the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, *shape, generator=generator).to(like)


def hutchinson(jacobian: Jacobian, num_directions: int, distribution: str, seed: int) -> FisherComponents:
    """Largest Rayleigh quotient of (L J)(L J)^T over random vectors, the same ones for each sample."""
    root = _Root(jacobian.logits)
    directions = _directions(num_directions, root.p.shape[1:], root.p, seed)
    directions = directions if distribution == "gaussian" else directions.sign()
    value = root.p.new_zeros(len(root.p))
    for w in directions:
        product = jacobian.transposed_product(root.apply_transposed(w.expand_as(root.p)))
        value = torch.maximum(value, product.square().sum(dim=1) / w.square().sum())
    return FisherComponents(value, torch.full_like(root.preds[:, 0], num_directions))


@torch.no_grad()
def blackbox(
    model: Callable[..., Any], x: Tensor, space: InputSpace, num_directions: int, rayleigh_ritz: bool, seed: int
) -> FisherComponents:
    """Central differences of log p along random unit vectors v, the same ones for each sample."""

    def log_p(perturbation: Tensor | float) -> Tensor:
        logits = compute_logits(model, x + perturbation / space.scale(x))
        check_finite(logits)
        return logits.to(accumulation_dtype(logits.device)).log_softmax(dim=1)

    p = log_p(0.0).exp()
    directions = torch.nn.functional.normalize(_directions(num_directions, (x[0].numel(),), p, seed))
    steps = _STEP_SIZE * directions.view(-1, *x.shape[1:]).to(x.dtype)
    differences = torch.stack([(log_p(h) - log_p(-h)) / (2 * _STEP_SIZE) for h in steps], dim=2)
    form = differences.mT @ (p.unsqueeze(2) * differences)  # V^T G V
    value = form.diagonal(dim1=1, dim2=2).amax(dim=1)
    if rayleigh_ritz:
        # Largest eigenvalue of the form relative to V^T V, which has no inverse for more directions than dimensions
        lengths, axes = torch.linalg.eigh(directions @ directions.T)
        axes = axes[:, lengths > 1e-4] / lengths[lengths > 1e-4].sqrt()
        value = torch.maximum(value, torch.linalg.eigvalsh(axes.mT @ form @ axes)[:, -1])
    queries = torch.full((len(x),), 2 * num_directions + 1, device=x.device)
    return FisherComponents(value, queries)

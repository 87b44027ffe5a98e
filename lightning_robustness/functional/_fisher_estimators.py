from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_robustness._arguments import check_flag, check_integer, check_number, check_option
from lightning_robustness._model.access import check_finite, compute_logits
from lightning_robustness._numbers import accumulation_dtype, decompose
from lightning_robustness.functional._jacobian import InputJacobian
from lightning_robustness.input_space import InputSpace


class FisherOperator:
    """Fisher information G = J^T F J of each input, with F = diag(p) - p p^T = L^T L, by its factor L J.

    L = diag(sqrt(p)) (I - 1 p^T), so the rows of L J are sqrt(p_k) grad log p_k. G, an n x n matrix, and the K x K
    matrix M = (L J)(L J)^T have the same non-zero eigenvalues. With a Jacobian that creates graphs, ``gram`` and
    ``transposed_product`` can be differentiated.

    Logits are taken relative to the logit of the predicted class, which changes nothing but keeps differences accurate
    where its probability rounds to one.
    """

    def __init__(self, jacobian: InputJacobian) -> None:
        self._jacobian = jacobian
        self.rounding = jacobian.rounding
        log_p = jacobian.logits.to(accumulation_dtype(jacobian.logits.device)).log_softmax(dim=1)
        self.p, self.sqrt_p, self.preds = log_p.exp(), (log_p / 2).exp(), log_p.argmax(dim=1, keepdim=True)

    def gram(self) -> Tensor:
        """Compute M, shape ``(N, K, K)``, from all rows of J."""
        rows = self._jacobian.rows()
        # Rows relative to the predicted class, then to their mean under p: the gradients of log p_k
        rows = rows - rows.gather(1, self.preds.unsqueeze(2).expand(-1, 1, rows.shape[2]))
        gram = (rows @ rows.mT).to(self.p.dtype)
        mean = (gram @ self.p.unsqueeze(2)).squeeze(2)
        gram = gram - mean.unsqueeze(1) - mean.unsqueeze(2) + (self.p * mean).sum(dim=1)[:, None, None]
        return self.sqrt_p.unsqueeze(1) * gram * self.sqrt_p.unsqueeze(2)

    def transposed_product(self, c: Tensor) -> Tensor:
        """Compute (L J)^T c for c of shape ``(N, K)``, as a tensor of shape ``(N, n)``."""
        return self._jacobian.transposed_product(self._apply_transposed(c))

    def gram_product(self, c: Tensor) -> Tensor:
        """Compute M c for c of shape ``(N, K)``, without a graph."""
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


_STEP_SIZE = 1e-3  # of the central differences

FisherMethod = Literal["auto", "exact", "lanczos", "power", "rayleigh", "blackbox"]
Distribution = Literal["gaussian", "rademacher"]


@dataclass(frozen=True)
class FisherSettings:
    """How the spectral norm is computed, checked once: the options that function, metric and meter share."""

    method: FisherMethod = "auto"
    input_space: InputSpace | None = None
    tolerance: float = 1e-6
    max_steps: int = 100
    num_directions: int = 20
    distribution: Distribution = "gaussian"
    rayleigh_ritz: bool = True
    chunk_size: int | None = None
    seed: int = 0
    direction: bool = False

    def __post_init__(self) -> None:
        check_option("method", self.method, FisherMethod)
        check_option("distribution", self.distribution, Distribution)
        check_number("tolerance", self.tolerance)
        check_flag("rayleigh_ritz", self.rayleigh_ritz)
        check_integer("max_steps", self.max_steps, minimum=1)
        check_integer("num_directions", self.num_directions, minimum=1)
        if self.chunk_size is not None:
            check_integer("chunk_size", self.chunk_size, minimum=1)


class FisherComponents(NamedTuple):
    """Spectral norm of the Fisher information of each sample, with the by-products of its computation.

    Estimators return the direction as a vector over the classes, which (L J)^T maps to the space of inputs; those
    without gradients return it there.
    """

    spectral_norm: Tensor
    products: Tensor
    residual: Tensor | None = None
    trace: Tensor | None = None
    jacobian_norm: Tensor | None = None
    lipschitz: Tensor | None = None
    boundary: Tensor | None = None
    nonfinite_gradients: Tensor | None = None
    direction: Tensor | None = None
    converged: Tensor | None = None


def exact(jacobian: InputJacobian, settings: FisherSettings) -> FisherComponents:
    """Compute everything from all rows of J: G has the eigenvalues of the K x K matrix (L J)(L J)^T."""
    operator, rows = FisherOperator(jacobian), jacobian.rows()
    gram = operator.gram()
    squared_norms = gram.diagonal(dim1=1, dim2=2).clamp(min=0)  # p_k ||grad log p_k||^2
    values, vectors = (
        decompose(torch.linalg.eigh, gram) if settings.direction else (decompose(torch.linalg.eigvalsh, gram), None)
    )
    return FisherComponents(
        spectral_norm=values[:, -1].clamp(min=0),
        products=torch.full_like(operator.preds[:, 0], rows.shape[1]),
        trace=squared_norms.sum(dim=1),
        jacobian_norm=decompose(torch.linalg.eigvalsh, (rows @ rows.mT).to(gram.dtype))[:, -1].clamp(min=0).sqrt(),
        lipschitz=(operator.sqrt_p * squared_norms.sqrt()).amax(dim=1),
        direction=None if vectors is None else vectors[:, :, -1],
    )


def _nothing(operator: FisherOperator) -> FisherComponents:
    """Return what an iteration has found before its first step."""
    zeros, products = torch.zeros_like(operator.p[:, 0]), torch.zeros_like(operator.preds[:, 0])
    return FisherComponents(zeros, products, residual=zeros.clone(), direction=torch.zeros_like(operator.p))


def _write(found: FisherComponents, rows: Tensor, *parts: Tensor | int) -> None:
    """Write value, products, residual and vector of samples; each keeps what its last step found."""
    kept: Any = (found.spectral_norm, found.products, found.residual, found.direction)
    for values, part in zip(kept, parts, strict=True):
        values[rows] = part


def _ritz(basis: Tensor, image: Tensor, rounding: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the largest Ritz value of G on the span of (L J)^T C, a bound on its residual, its vector, and the gap.

    With M = (L J)(L J)^T, the inner products of these vectors are C^T M C, and those with G between them are
    (M C)^T (M C). So the image M C gives a Ritz value half a step ahead of the one on C itself.
    """
    gram = basis.mT @ image
    lengths, axes = decompose(torch.linalg.eigh, (gram + gram.mT) / 2)
    # Shorter vectors consist of rounding errors, which dividing by their length would amplify
    enough = lengths > 10 * rounding * lengths[:, -1:]
    axes = axes * torch.where(enough, lengths, 1.0).rsqrt().mul(enough).unsqueeze(1)
    mapped = image @ axes
    values, vectors = decompose(torch.linalg.eigh, mapped.mT @ mapped)
    value, vector = values[:, -1].clamp(min=0), vectors[:, :, -1:]
    # The residual of y = J^T L^T C s is J^T L^T (M - value) C s, and that matrix has norm sqrt(||G||)
    residual = torch.linalg.vector_norm((mapped - value[:, None, None] * (basis @ axes)) @ vector, dim=(1, 2))
    gap = value - (values[:, -2] if values.shape[1] > 1 else 0.0)
    return value, value.sqrt() * residual + rounding * value, (basis @ (axes @ vector)).squeeze(2), gap


def lanczos(jacobian: InputJacobian, settings: FisherSettings) -> FisherComponents:
    """Run Lanczos iteration on (L J)(L J)^T from the predicted class, with full re-orthogonalisation."""
    operator = FisherOperator(jacobian)
    found, tiny = _nothing(operator), torch.finfo(operator.p.dtype).tiny
    c = operator.start()
    active, going = torch.arange(len(c), device=c.device), torch.ones(len(c), dtype=torch.bool, device=c.device)
    basis = image = c.new_zeros(*c.shape, 0)
    for step in range(1, min(settings.max_steps, c.shape[1]) + 1):
        mapped = operator.gram_product(c)
        basis, image = torch.cat([basis, c.unsqueeze(2)], dim=2), torch.cat([image, mapped.unsqueeze(2)], dim=2)
        value, residual, vector, gap = _ritz(basis, image, operator.rounding)
        _write(found, active[going], value[going], 2 * step, residual[going], vector[going])
        # The error of a Ritz value is at most the residual and, once it is separated from the next, quadratic in it
        error = torch.minimum(residual, residual.square() / gap.clamp(min=tiny))
        for _ in range(2):
            mapped = mapped - (basis @ (basis.mT @ mapped.unsqueeze(2))).squeeze(2)
        size = torch.linalg.vector_norm(mapped, dim=1, keepdim=True)
        # One step alone may be close to a smaller eigenvalue
        is_off = (error > settings.tolerance * value) | (step == 1)
        going = going & is_off & (size.squeeze(1) > operator.rounding * value)
        if not going.any():
            break
        c = mapped / size.clamp(min=tiny)
        if 2 * going.sum() <= len(active):  # a new graph for the others is cheaper than products for all
            active, c, basis, image = active[going], c[going], basis[going], image[going]
            going = going[going]
            operator = FisherOperator(jacobian.restrict(active))
    return found


def power(jacobian: InputJacobian, settings: FisherSettings) -> FisherComponents:
    """Run power iteration from the predicted class, the paper's Algorithm 1."""
    operator = FisherOperator(jacobian)
    found, tiny = _nothing(operator), torch.finfo(operator.p.dtype).tiny
    c, value = operator.start(), torch.zeros_like(operator.p[:, 0])
    change = torch.zeros_like(value)
    going = torch.ones(len(c), dtype=torch.bool, device=c.device)
    for step in range(1, settings.max_steps + 1):
        mapped = operator.gram_product(c)
        previous_value, previous_change = value, change
        value = (c * mapped).sum(dim=1).clamp(min=0)
        residual = torch.linalg.vector_norm(mapped - value.unsqueeze(1) * c, dim=1)
        _write(found, going, value[going], 2 * step, residual[going], c[going])
        # Changes shrink geometrically, so the change still to come is the sum of a geometric series
        change = (value - previous_value).abs()
        ratio = (change / previous_change.clamp(min=tiny)).clamp(max=0.999)
        if step > 2:
            going = going & (change * ratio / (1 - ratio) > 0.1 * settings.tolerance * value)
        if not going.any():
            break
        size = torch.linalg.vector_norm(mapped, dim=1, keepdim=True)
        c = torch.where(size > 0, mapped / size.clamp(min=tiny), c)
    return found._replace(converged=~going)


def _directions(settings: FisherSettings, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Draw Gaussian vectors that depend on the seed alone, so that all batches on all devices get the same ones."""
    generator = torch.Generator().manual_seed(settings.seed)
    return torch.randn(settings.num_directions, *shape, generator=generator).to(like)


def rayleigh(jacobian: InputJacobian, settings: FisherSettings) -> FisherComponents:
    """Take the largest Rayleigh quotient of (L J)(L J)^T over random vectors, the paper's Algorithm 2.

    The vectors are the same for all samples. The result is a lower bound.
    """
    operator = FisherOperator(jacobian)
    directions = _directions(settings, operator.p.shape[1:], operator.p)
    directions = directions if settings.distribution == "gaussian" else directions.sign()
    value, best = torch.zeros_like(operator.p[:, 0]), torch.zeros_like(operator.p)
    for w in directions:
        product = operator.transposed_product(w.expand_as(operator.p))
        quotient = product.square().sum(dim=1) / w.square().sum()
        best = torch.where((quotient > value).unsqueeze(1), w, best)
        value = torch.maximum(value, quotient)
    return FisherComponents(value, torch.full_like(operator.preds[:, 0], len(directions)), direction=best)


ESTIMATORS: dict[str, Callable[[InputJacobian, FisherSettings], FisherComponents]] = {
    "exact": exact,
    "lanczos": lanczos,
    "power": power,
    "rayleigh": rayleigh,
}


def check_can_hold_steps(dtype: torch.dtype) -> None:
    """Check that rounding does not swallow the steps of the central differences."""
    if torch.finfo(dtype).bits < 32:
        raise ValueError(
            f"Expected a model and inputs in at least float32 for method='blackbox', whose steps of {_STEP_SIZE} get "
            f"lost in {dtype}. Convert both by `float()`, or choose another method."
        )


@torch.no_grad()
def blackbox(model: Callable[..., Any], x: Tensor, space: InputSpace, settings: FisherSettings) -> FisherComponents:
    """Take central differences of log p along random unit vectors v, the same ones for all samples."""
    check_can_hold_steps(x.dtype)

    def log_p(perturbation: Tensor | float) -> Tensor:
        logits = compute_logits(model, x + perturbation / space.scale(x))
        check_finite(logits)
        check_can_hold_steps(logits.dtype)
        return logits.to(accumulation_dtype(logits.device)).log_softmax(dim=1)

    p = log_p(0.0).exp()
    directions = torch.nn.functional.normalize(_directions(settings, (x[0].numel(),), p))
    steps = _STEP_SIZE * directions.view(-1, *x.shape[1:]).to(x.dtype)
    differences = torch.stack([(log_p(h) - log_p(-h)) / (2 * _STEP_SIZE) for h in steps], dim=2)
    form = differences.mT @ (p.unsqueeze(2) * differences)  # V^T G V
    value, best = form.diagonal(dim1=1, dim2=2).max(dim=1)
    mix = torch.nn.functional.one_hot(best, len(directions)).to(form)
    if settings.rayleigh_ritz:
        # Largest eigenvalue of the form relative to V^T V, which is singular for more directions than dimensions
        lengths, axes = decompose(torch.linalg.eigh, directions @ directions.T)
        axes = axes[:, lengths > 1e-4] / lengths[lengths > 1e-4].sqrt()
        value = torch.maximum(value, decompose(torch.linalg.eigvalsh, axes.mT @ form @ axes)[:, -1])
        mix = decompose(torch.linalg.eigh, axes.mT @ form @ axes)[1][:, :, -1] @ axes.mT if settings.direction else mix
    queries = torch.full((len(x),), 2 * len(directions) + 1, device=x.device)
    if not settings.direction:
        return FisherComponents(value, queries)
    slope = (differences.gather(1, p.argmax(1)[:, None, None].expand(-1, 1, len(directions))).squeeze(1) * mix).sum(1)
    return FisherComponents(value, queries, direction=downhill(mix @ directions, slope))


def downhill(direction: Tensor, slope: Tensor) -> Tensor:
    """Return unit vectors along which the probability of the predicted class falls, given its slope along them."""
    direction = direction / direction.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(direction.dtype).tiny)
    return normalize(torch.where((slope > 0).unsqueeze(1), -direction, direction))


def input_direction(jacobian: InputJacobian, vector: Tensor) -> Tensor:
    """Map a vector over the classes to a unit vector in the space of inputs, along (L J)^T c."""
    operator = FisherOperator(jacobian)
    direction = operator.transposed_product(vector.to(operator.p))
    # (L J)^T e_k is parallel to the gradient of log p_k, which `start` gives without rounding
    return downhill(direction, (direction * operator.transposed_product(operator.start())).sum(dim=1))

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_robustness.attacks.attack import Attack, Perturbation
from lightning_robustness.attacks.budget import Norm
from lightning_robustness.attacks.classifier import Classifier
from lightning_robustness.attacks.norms import l2_norm, nonzero
from lightning_robustness.attacks.objective import Loss, margin
from lightning_robustness.utilities.checks import check_integer, check_number, check_option

# Iterations, of 10,000, after which the share of the window is halved
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


@dataclass(frozen=True, kw_only=True, repr=False)
class Square(Attack):
    """The square attack, a random search that needs outputs only, no gradients.

    It changes the input within a window at a random place and keeps the change if the objective falls. The window
    covers a share ``p`` of the input, which is halved on the published schedule, stretched to ``num_queries``. It is a
    square as far as it fits, else the rectangle of the same area: inputs of any height and width work, and inputs
    without a height, of shape ``(N, C, L)`` or ``(N, L)``, get intervals. A sample leaves the batch when it is broken.

    Args:
        eps: Largest distance from the input, in the units of the range.
        num_queries: Number of forward passes.
        norm: ``"linf"`` or ``"l2"``.
        p: Share of the input that the first windows cover.
        loss: ``"margin"`` between the label and the best other class, or ``"cross_entropy"``.
        targeted: Whether ``y`` holds the labels to be predicted after the attack, instead of the true labels.
        all_steps: Whether every sample goes through every step, also those that are misclassified early.

    Raises:
        ValueError: If an argument is out of range or unknown, or inputs have no shape that it knows.

    Example:
        >>> import torch
        >>> from lightning_robustness.attacks import Square
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> Square(eps=0.25, num_queries=50)(model, torch.tensor([[0.75, 0.5]]), torch.tensor([0]))
        tensor([[0.5000, 0.7500]])

    """

    eps: float = 8 / 255
    num_queries: int = 5000
    norm: Norm = "linf"
    p: float = 0.8
    loss: Loss = "margin"
    white_box: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("eps", self.eps)
        check_number("p", self.p, exclusive=True)
        if self.p > 1:
            raise ValueError(f"Expected argument `p` to be a share of at most 1 but got {self.p}.")
        check_integer("num_queries", self.num_queries, minimum=1)
        check_option("norm", self.norm, Norm)
        check_option("loss", self.loss, Loss)

    @torch.no_grad()
    def perturb(self, model: Classifier, x: Tensor, y: Tensor, active: Tensor) -> Perturbation:
        """Attack the active samples of a batch, given by their indices, within a sandbox."""
        image, num_samples, queries = _as_images(x), len(x), torch.zeros_like(y)
        # Random numbers are drawn for the whole batch: what is tried for a sample depends on no other sample
        final, index, lowest = image.clone(), active, x.new_full((len(active),), torch.inf)
        best, image, y = self._start(model, image)[active], image[active], y[active]
        for query in range(self.num_queries):
            signs = _random_signs(image, num_samples)[index]
            candidate = (
                self._propose(model, image, best, self.window(query, *image.shape[2:]), signs) if query else best
            )
            objective, broken = self._objective(model, candidate.reshape(-1, *x.shape[1:]), y)
            better = ((objective < lowest) | (broken & (not self.all_steps))).nonzero().squeeze(1)
            best[better], lowest[better] = candidate[better], objective[better]
            if not self.all_steps and broken.any():
                final[index[broken]] = best[broken]
                queries[index[broken]] = query + 1
                rest = (~broken).nonzero().squeeze(1)
                index, image, best, y, lowest = (t[rest] for t in (index, image, best, y, lowest))
                if len(index) == 0:
                    break
        final[index], queries[index] = best, self.num_queries
        return Perturbation(final.reshape(x.shape), queries)

    def window(self, query: int, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the window of a query, for an input of this height and width."""
        iteration = 10_000 * (query - 1) // self.num_queries  # the first query is the start
        p = self.p / 2 ** sum(iteration > halving for halving in _HALVINGS)
        area, smallest = p * height * width, 1 if self.norm == "linf" else 3
        side = max(round(math.sqrt(area)), smallest)
        if self.norm == "l2":
            side += 1 - side % 2  # a bump has a middle
        rows, columns = side, side
        if height < side:
            rows, columns = height, max(round(area / height), smallest)
        elif width < side:
            rows, columns = max(round(area / width), smallest), width
        return min(rows, height), min(columns, width)

    def _objective(self, model: Classifier, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value to be minimised, and which samples are broken."""
        logits = model(x)
        objective = margin(logits, y) if self.loss == "margin" else -cross_entropy(logits, y, reduction="none")
        return (-objective if self.targeted else objective), self.reached(logits, y)

    def _start(self, model: Classifier, image: Tensor) -> Tensor:
        if self.norm == "linf":  # vertical stripes
            return model.clamp(image + self.eps * _random_signs(image, len(image), image.shape[3]))
        height, width = image.shape[2:]
        rows, columns = max(height // 5, 1), max(width // 5, 1)
        delta = torch.zeros_like(image)
        for top in range(0, height - rows + 1, rows):
            for left in range(0, width - columns + 1, columns):
                bump = _bump(rows, columns, image) * _random_signs(image, len(image))
                delta[:, :, top : top + rows, left : left + columns] = bump
        return model.clamp(image + self.eps * delta / nonzero(l2_norm(delta)))

    def _propose(
        self, model: Classifier, image: Tensor, best: Tensor, window: tuple[int, int], signs: Tensor
    ) -> Tensor:
        here = _place(window, image)
        if self.norm == "linf":
            candidate = best.clone()
            candidate[here] = model.clamp(image[here] + self.eps * signs)
            return candidate
        # Mass moves to a bump here, from another window and from what the budget has left
        delta, there = best - image, _place(window, image)
        outside = torch.ones_like(image[:1, :1])
        outside[here] = outside[there] = 0.0
        unused = (self.eps**2 - l2_norm(delta).square()).clamp(min=0.0) / image.shape[1]
        inside = l2_norm(delta, 2).square() - l2_norm(delta * outside, 2).square()
        bump = _bump(*window, image) * signs + delta[here] / nonzero(l2_norm(delta[here], 2))
        delta[there] = 0.0
        delta[here] = bump / nonzero(l2_norm(bump, 2)) * (inside.clamp(min=0.0) + unused).sqrt()
        return model.clamp(image + self.eps * delta / nonzero(l2_norm(delta)))


def _as_images(x: Tensor) -> Tensor:
    """Inputs with channel, height and width; sequences have a height of 1."""
    if x.ndim not in (2, 3, 4):
        raise ValueError(
            "Expected inputs of shape (N, C, H, W), (N, C, L) or (N, L) for the square attack but got "
            f"{tuple(x.shape)}. Wrap the model in a function that reshapes them."
        )
    return x if x.ndim == 4 else x.reshape(len(x), x.shape[1] if x.ndim == 3 else 1, 1, x.shape[-1])


def _place(window: tuple[int, int], image: Tensor) -> tuple[slice, slice, slice, slice]:
    """Put a window of this size at a random place, the same in all images and channels."""
    height, width = window
    space = torch.tensor([image.shape[2] - height + 1, image.shape[3] - width + 1])
    top, left = (torch.rand(2) * space).long().tolist()  # on the CPU: no transfer from the device
    return slice(None), slice(None), slice(top, top + height), slice(left, left + width)


def _random_signs(image: Tensor, num_samples: int, num_columns: int = 1) -> Tensor:
    shape = num_samples, image.shape[1], 1, num_columns
    return torch.randint(2, shape, device=image.device).to(image.dtype) * 2 - 1


def _bump(rows: int, columns: int, image: Tensor) -> Tensor:
    """Two opposite pyramids of norm 1, side by side or, at random, one above the other."""
    if columns < 2 or (rows >= 2 and torch.rand(()) < 0.5):
        first, second = _pyramid(rows // 2, columns), _pyramid(rows - rows // 2, columns)
        bump = torch.cat([first, -second], dim=0)
    else:
        first, second = _pyramid(rows, columns // 2), _pyramid(rows, columns - columns // 2)
        bump = torch.cat([first, -second], dim=1)
    return (bump / nonzero(l2_norm(bump, 0))).to(image)


def _pyramid(rows: int, columns: int) -> Tensor:
    """Nested rectangles, of which the k-th from the middle adds 1 / k ** 2; of norm 1."""
    steps = torch.maximum(
        (torch.arange(rows) - rows // 2).abs().unsqueeze(1), (torch.arange(columns) - columns // 2).abs().unsqueeze(0)
    )
    layers = 1 / torch.arange(1, max(rows, columns) // 2 + 2) ** 2
    heights = layers.flip(0).cumsum(0).flip(0)[steps]
    return heights / nonzero(l2_norm(heights, 0))

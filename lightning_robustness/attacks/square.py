import functools
import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_robustness._arguments import check_flag, check_integer, check_number, check_option
from lightning_robustness._isolation.draws import Draws
from lightning_robustness.attacks._classifier import Classifier
from lightning_robustness.attacks._steps import Loss, as_column, l2_norm, margin, nonzero
from lightning_robustness.attacks.attack import Attack, Norm, Perturbation

# Number of queries that random numbers are drawn for at a time
_BLOCK = 64
# Iterations, of 10,000, after which the share of the window is halved
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


@dataclass(frozen=True, kw_only=True, repr=False)
class Square(Attack):
    """The square attack, a random search that needs outputs only, no gradients.

    It changes the input within a window at a random place and keeps the change if the objective falls. The window
    covers a share ``p`` of the input, which is halved on the published schedule, stretched to ``num_queries``. It is a
    square as far as it fits, else the rectangle of the same area: inputs of any height and width work, and inputs
    without a height, of shape ``(N, C, L)`` or ``(N, L)``, get intervals. A sample leaves the batch when it is broken.
    In the l-infinity norm, a change that would have no effect gets the opposite signs instead: on small
    images this succeeds more often than AutoAttack and torchattacks do with the same number of queries.

    Args:
        eps: Largest distance from the input, in the units of the range.
        num_queries: Number of forward passes.
        norm: ``"linf"`` or ``"l2"``.
        p: Share of the input that the first windows cover.
        loss: ``"margin"`` between the label and the best other class, or ``"cross_entropy"``.
        as_published: Whether to search as AutoAttack and torchattacks do, whose search differs in two things: queries
            may change nothing, and windows never reach the last row and the last column, unless they have no choice.
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
    as_published: bool = False
    white_box: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eps", self.eps)
        check_number("p", self.p, exclusive=True, maximum=1.0)
        check_integer("num_queries", self.num_queries, minimum=1)
        check_option("norm", self.norm, Norm)
        check_option("loss", self.loss, Loss)
        check_flag("as_published", self.as_published)

    @torch.no_grad()
    def perturb(self, model: Classifier, x: Tensor, y: Tensor) -> Perturbation:
        """Attack all samples of a batch, within a sandbox."""
        image, draws = _as_images(x), model.draws
        final, queries = torch.empty_like(image), torch.full_like(y, self.num_queries)
        index, lowest = torch.arange(len(x), device=x.device), x.new_full((len(x),), torch.inf)
        best, places, signs = self._start(model, image, draws), x, x
        for query in range(self.num_queries):
            if query % _BLOCK == 0:  # drawn for many queries at once, since each draw has a fixed cost
                places = draws.uniform(2 * (query // _BLOCK), (_BLOCK, 5))
                signs = draws.signs(2 * (query // _BLOCK) + 1, (_BLOCK, image.shape[1], 1), x.dtype)
            candidate = best
            drawn = (places[:, query % _BLOCK], signs[:, query % _BLOCK])
            if query:
                candidate = self._propose(model, image, best, self.window(query, *image.shape[2:]), *drawn)
            objective, broken = self._objective(model, candidate.reshape(-1, *x.shape[1:]), y)
            better = (objective < lowest) | (broken & (not self.all_steps))
            best, lowest = torch.where(as_column(better, best), candidate, best), torch.where(better, objective, lowest)
            # The number of these is all that the device is waited for
            rest = index if self.all_steps else (~broken).nonzero().squeeze(1)
            if len(rest) < len(broken):
                final.index_copy_(0, index, best)  # written again where the search continues
                queries[index] = torch.where(broken, query + 1, self.num_queries)
                index, image, best, y, lowest = (t[rest] for t in (index, image, best, y, lowest))
                draws, places, signs = draws.rows(rest), places[rest], signs[rest]
                if len(index) == 0:
                    break
        final.index_copy_(0, index, best)
        return Perturbation(final.reshape(x.shape), queries)

    def window(self, query: int, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the window of a query, for an input of this height and width."""
        iteration = 10_000 * (query - 1) // self.num_queries  # the first query is the start
        p = self.p / 2 ** sum(iteration > halving for halving in _HALVINGS)
        area = p * height * width
        smallest = 1 if self.norm == "linf" else 3
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

    def _start(self, model: Classifier, image: Tensor, draws: Draws) -> Tensor:
        channels, height, width = image.shape[1:]
        draws = draws.stream(0)
        if self.norm == "linf":  # vertical stripes
            return model.clamp(image + self.eps * draws.signs(0, (channels, 1, width), image.dtype))
        rows, columns = max(height // 5, 1), max(width // 5, 1)
        corners = itertools.product(range(0, height - rows + 1, rows), range(0, width - columns + 1, columns))
        bumps, delta = _bumps(rows, columns).to(image), torch.zeros_like(image)
        for number, (top, left) in enumerate(corners):
            signs, upright = draws.signs(number, (channels + 1, 1), image.dtype).split([channels, 1], dim=1)
            bump = torch.where(upright > 0, bumps[0], bumps[1]) * signs
            delta[:, :, top : top + rows, left : left + columns] = bump.unflatten(2, (rows, columns))
        return model.clamp(image + self.eps * delta / nonzero(l2_norm(delta)))

    def _propose(
        self, model: Classifier, image: Tensor, best: Tensor, window: tuple[int, int], places: Tensor, signs: Tensor
    ) -> Tensor:
        """Change inputs within a window: five uniform numbers put it in its place, and each channel has a sign."""
        shape = image.shape
        here = self._cells(window, image.shape, places[:, :2])
        image, best = image.flatten(2), best.flatten(2)
        if self.norm == "linf":
            pixels, before = image.gather(2, here), best.gather(2, here)
            after = model.clamp(pixels + self.eps * signs)
            if not self.as_published:  # a query that changes nothing is wasted: the opposite signs do change something
                is_same = (after == before).flatten(1).all(dim=1).reshape(-1, 1, 1)
                after = torch.where(is_same, model.clamp(pixels - self.eps * signs), after)
            return best.scatter(2, here, after).reshape(shape)
        bumps = _bumps(*window).to(image)
        bump = torch.where(places[:, 4:].unsqueeze(2) < 0.5, bumps[0], bumps[1]) * signs
        delta = _move_mass(best - image, here, self._cells(window, shape, places[:, 2:4]), bump, self.eps)
        return model.clamp(image + self.eps * delta / nonzero(l2_norm(delta))).reshape(shape)

    def _cells(self, window: tuple[int, int], shape: torch.Size, places: Tensor) -> Tensor:
        """Put a window at a place in each image, by two numbers from 0 to 1; return the pixels in it as indices."""
        (rows, columns), (num_samples, channels, height, width) = window, shape
        top, left = (
            (place * (space + (not self.as_published))).long().clamp(max=space)
            for place, space in zip(places.unbind(dim=1), (height - rows, width - columns), strict=True)
        )
        row, column = torch.arange(rows, device=places.device), torch.arange(columns, device=places.device)
        inside = (row.unsqueeze(1) * width + column).flatten()
        return ((top * width + left).unsqueeze(1) + inside).unsqueeze(1).expand(num_samples, channels, -1)


def _move_mass(delta: Tensor, target: Tensor, source: Tensor, bump: Tensor, eps: float) -> Tensor:
    """Move what two windows hold, and what the budget has left, to a bump in the target: Algorithm 3 of the paper."""
    outside = torch.ones_like(delta[:, :1]).scatter_(2, target[:, :1], 0.0).scatter_(2, source[:, :1], 0.0)
    mass = l2_norm(delta, 2).square() - l2_norm(delta * outside, 2).square()  # of each channel
    unused = (eps**2 - l2_norm(delta).square()).clamp(min=0.0) / delta.shape[1]
    held = delta.gather(2, target)
    bump = bump + held / nonzero(l2_norm(held, 2))
    moved = bump / nonzero(l2_norm(bump, 2)) * (mass.clamp(min=0.0) + unused).sqrt()
    return delta.scatter(2, source, 0.0).scatter_(2, target, moved)


def _as_images(x: Tensor) -> Tensor:
    """Inputs with channel, height and width; sequences have a height of 1."""
    if x.ndim not in (2, 3, 4):
        raise ValueError(
            "Expected inputs of shape (N, C, H, W), (N, C, L) or (N, L) for the square attack but got "
            f"{tuple(x.shape)}. Wrap the model in a function that reshapes them."
        )
    return x if x.ndim == 4 else x.reshape(len(x), x.shape[1] if x.ndim == 3 else 1, 1, x.shape[-1])


@functools.lru_cache(maxsize=64)
def _bumps(rows: int, columns: int) -> Tensor:
    """Make two bumps of norm 1, each of two opposite pyramids: one above the other and side by side, as far as fits."""
    above = torch.cat([_pyramid(rows // 2, columns), -_pyramid(rows - rows // 2, columns)], dim=0)
    across = torch.cat([_pyramid(rows, columns // 2), -_pyramid(rows, columns - columns // 2)], dim=1)
    above, across = above if rows >= 2 else across, across if columns >= 2 else above
    bumps = torch.stack([above.flatten(), across.flatten()])
    return bumps / nonzero(l2_norm(bumps))


def _pyramid(rows: int, columns: int) -> Tensor:
    """Nested rectangles, of which the k-th from the middle adds 1 / k ** 2; of norm 1."""
    steps = torch.maximum(
        (torch.arange(rows) - rows // 2).abs().unsqueeze(1), (torch.arange(columns) - columns // 2).abs().unsqueeze(0)
    )
    layers = 1 / torch.arange(1, max(rows, columns) // 2 + 2) ** 2
    heights = layers.flip(0).cumsum(0).flip(0)[steps]
    return heights / nonzero(l2_norm(heights, 0))

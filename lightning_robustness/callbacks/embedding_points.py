from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_robustness.measurement.attack_meter import Examples
from lightning_robustness.measurement.subject import Samples


class EmbeddingPoints(NamedTuple):
    """Inputs whose embeddings are shown together: a sample, and pairs of clean and adversarial inputs.

    Args:
        samples: All inputs.
        kinds: ``"clean"``, or the name of the attack that made the input.
        following: Index of the adversarial input that a line leads to from a clean one, else None.

    """

    samples: Samples
    kinds: list[str]
    following: list[int | None]

    @classmethod
    def of(cls, samples: Samples, examples: Mapping[str, Examples]) -> Self:
        """Add the examples of attacks to a sample, where both are inputs of one shape and nothing else."""
        x, y, positions, extras = samples
        kinds, following = ["clean"] * len(x), list[int | None]([None] * len(x))
        if not isinstance(x, Tensor) or y is None or extras is not None:
            return cls(samples, kinds, following)
        pairs = {name: pair for name, pair in examples.items() if pair.x.shape[1:] == x.shape[1:]}
        for name, pair in pairs.items():
            start, number = len(kinds), len(pair.x)
            kinds += ["clean"] * number + [name] * number
            following += [*range(start + number, start + 2 * number), *[None] * number]
        x = torch.cat([x, *(part.to(x) for pair in pairs.values() for part in pair[:2])])
        y = torch.cat([y, *(pair.y.to(y) for pair in pairs.values() for _ in range(2))])
        positions = torch.cat([positions, positions.new_zeros(len(x) - len(positions))])
        return cls(Samples(x, y, positions), kinds, following)

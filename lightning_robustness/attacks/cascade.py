from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_robustness.attacks.attack import Attack, Perturbation, perturb
from lightning_robustness.attacks.budget import Budget, budgets_of
from lightning_robustness.attacks.classifier import Classifier
from lightning_robustness.utilities.checks import check_attack
from lightning_robustness.utilities.input_space import InputSpace


@dataclass(frozen=True, kw_only=True, repr=False)
class Cascade(Attack):
    """Several attacks, each of which sees only the samples that those before it did not break.

    A sample counts as broken if any of the attacks breaks it: the success rate is that of the worst case.

    Args:
        attacks: Attacks, cheap ones first; callables that are not built in work too.
        targeted: Whether ``y`` holds the labels to be predicted after the attack; the attacks must agree.
        all_steps: Whether all attacks see all samples.

    Raises:
        ValueError: If there is no attack, or one is targeted and the cascade is not, or the reverse.

    Example:
        >>> import torch
        >>> from lightning_robustness.attacks import PGD, Cascade, run
        >>> model = torch.nn.Linear(2, 2)
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> x, y = torch.tensor([[0.75, 0.5], [1.0, 0.5]]), torch.tensor([0, 0])
        >>> attack = Cascade(attacks=(PGD(eps=0.25, steps=1, start="clean"), PGD(eps=0.375, steps=1, start="clean")))
        >>> run(model, attack, x, y).linf
        tensor([0.2500, 0.3750])

    """

    attacks: tuple[Callable[..., Any], ...]
    white_box: ClassVar[None] = None  # some members may be, others not

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.attacks, (str, Mapping)) or not isinstance(self.attacks, Iterable):
            raise TypeError(f"Expected argument `attacks` to be a sequence of attacks but got {self.attacks!r}.")
        object.__setattr__(self, "attacks", tuple(self.attacks))
        if not self.attacks:
            raise ValueError("Expected argument `attacks` to hold at least one attack but got none.")
        for attack in self.attacks:
            check_attack(attack, "attacks")
            if isinstance(attack, Attack) and attack.targeted != self.targeted:
                raise ValueError(
                    f"Expected all attacks to have targeted={self.targeted} as the cascade has, but got {attack!r}."
                )

    def budgets_in(self, input_space: InputSpace) -> list[Budget | None]:
        """Return the budgets of all members."""
        return [budget for attack in self.attacks for budget in budgets_of(attack, input_space)]

    def perturb(self, model: Classifier, x: Tensor, y: Tensor, active: Tensor) -> Perturbation:
        """Attack the active samples of a batch, given by their indices, within a sandbox."""
        x_adv, queries = x.clone(), torch.zeros_like(y)
        survivors, draws = active, model.draws
        for number, attack in enumerate(self.attacks):
            model.draws = draws.stream(number)  # a second attack must not try what the first has tried
            perturbation = perturb(attack, model, x, y, survivors)
            # A sample keeps the input that broke it or, if none did, the last attempt
            x_adv[survivors] = perturbation.x_adv[survivors]
            with torch.no_grad():
                reached = self.reached(model(x_adv[survivors]), y[survivors])
            queries[survivors] += perturbation.queries[survivors] + 1
            survivors = survivors[~reached]
            if len(survivors) == 0:
                break
        model.draws = draws
        return Perturbation(x_adv, queries)

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from lightning_robustness._arguments import (
    check_flag,
    check_functions,
    check_integer,
    check_name,
    check_option,
    check_share,
)
from lightning_robustness._isolation.draws import Draws
from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._lightning.epoch_means import EpochMeans
from lightning_robustness._lightning.inner_attack import make_inner_attacks
from lightning_robustness._lightning.overfitting import (
    MANY_STEPS,
    CatastrophicOverfitting,
    watch_for_overfitting,
)
from lightning_robustness._lightning.trainer import forward_of
from lightning_robustness._lightning.training_step import (
    AdversarialLoss,
    TrainingStepCallback,
    check_loss,
    compute_loss,
    find_loss,
    published_attack,
    step_with_loss,
)
from lightning_robustness._model.access import ExtraInputs, compute_logits, find_extra_inputs
from lightning_robustness._model.batch import read_extras, read_labelled_batch, replace_in_batch
from lightning_robustness._processes import rank_zero_warn
from lightning_robustness.attacks import PGD, Attack, budget_of, run_attack
from lightning_robustness.attacks._classifier import Classifier, open_classifier
from lightning_robustness.attacks.attack import craft
from lightning_robustness.input_space import InputSpace, check_input_space

AdversarialMode = Literal["replace", "mix", "concat"]


class AdversarialTraining(TrainingStepCallback):
    r"""Train on adversarial inputs, without a change to the module or the data.

    Before each ``training_step``, the inputs of its batch are attacked with the network as it is then, and the step
    gets a new batch of the same type; the one that the loader made is left as it is, and is what the hooks of other
    callbacks see. The network is attacked on a detached copy of the inputs, without autocast but with TF32 where torch
    is set to it, as in the step itself, and without a trace in its gradients, modes, BatchNorm statistics or random
    states. Automatic and manual optimization, gradient accumulation, clipping, mixed precision and DDP work as usual.

    At the end of each epoch it logs, as ``<prefix>/<key>``:

    - ``loss``: mean of the loss that ``training_step`` returns, on the batches that it got
    - ``acc``: robust accuracy: accuracy in eval mode on the adversarial inputs, on some of the batches
    - ``broken``: share of the inputs classified correctly there that the attack broke
    - ``eps``: budget of the attack, where it has one
    - ``clipped``: share of the inputs with values outside the range, which were clipped for the attack
    - ``acc_pgd``: for PGD of one step: accuracy at the end of the epoch under PGD with 5 steps
    - ``overfitting``: for PGD of one step: 1 where the sign of catastrophic overfitting is there, else 0

    Args:
        attack: Name of an attack (``"pgd"`` as Madry et al. train; ``"fast"``: one step of 1.25 eps from a random
            start, as Wong et al. do; ``"cw"``, or another one that ``get_attack`` knows), an attack, or any other
            callable ``(model, x, y) -> x_adv`` on un-normalised inputs.
        eps: Largest distance from the input, in un-normalised units; a list has one for each epoch after the warm-up,
            of which the last one stays. By default, that of the attack.
        steps: Number of steps; by default, that of the attack.
        alpha: Size of a step; by default, that of the attack.
        mode: ``"replace"`` trains on adversarial inputs alone; ``"mix"`` replaces the share ``ratio`` of each batch,
            drawn at random; ``"concat"`` puts the adversarial inputs behind the clean ones, in a batch of twice
            the size, in which labels and everything else that has one entry per sample are repeated.
        ratio: Share of adversarial inputs in mode ``"mix"``.
        loss: ``"trades"`` or ``"mart"`` to train on that loss, instead of the one that ``training_step`` computes on
            adversarial inputs. The step runs on the clean batch, for everything but its loss; the new one is the
            cross-entropy loss of the paper, with hard labels, and takes two more forward passes. Without other
            arguments, the attack is that of the paper: PGD of 10 steps from a little noise.
        loss_weight: Weight of the divergence in that loss; by default 6 for TRADES and 5 for MART.
        warmup_epochs: Number of epochs at the beginning that are trained on clean batches. Nothing is logged in them: a
            ``ModelCheckpoint`` or ``EarlyStopping`` that monitors a key of this callback would end the run.
        input_space: Range and normalisation of the inputs; by default [0, 1], not normalised.
        eval_mode: Whether the network is attacked in eval mode, as it is used later. Without, in train mode: with the
            statistics of the attacked batch, and dropout.
        all_steps: Whether a built-in attack takes all steps for all samples, as published. Without, samples stop where
            they are first misclassified, which is weaker and faster.
        measure_every_n_batches: How often ``acc`` and ``broken`` are measured, by two forward passes; the first time on
            the first batch of an epoch.
        overfitting_samples: Number of an epoch's first inputs on which PGD of one step is compared with 5 steps at its
            end; 0 for no comparison.
        overfitting_checkpoint: Where to keep a checkpoint of the last epoch before catastrophic overfitting, one in
            which accuracy under 5 steps had not yet fallen; by default nowhere.
        forward_fn: Callable that takes the module and inputs and returns logits, where ``module(x)`` does not.
        batch_fn: Callable that takes a batch and returns inputs and labels, for batches of unusual form.
        seed: Seed of random starts. They differ from batch to batch, epoch to epoch and process to process, and a run
            that is resumed draws those that it would have drawn.
        prefix: First part of the keys.

    Raises:
        TypeError: If the attack is neither a name nor callable.
        ValueError: If an argument is out of range, unknown, or none that the attack has.

    Example:
        >>> from lightning_robustness.callbacks import AdversarialTraining
        >>> AdversarialTraining(attack="pgd", eps=8 / 255, steps=7).attack
        PGD(eps=0.03137254901960784, alpha=None, steps=7, norm='linf', start='uniform', restarts=None, momentum=0.0,
            loss='cross_entropy', schedule='constant', all_steps=True)
        >>> # Trainer(callbacks=[AdversarialTraining(attack="pgd", eps=8 / 255, steps=7)])

    """

    def __init__(
        self,
        attack: str | Attack | Callable[..., Any] = "pgd",
        eps: float | list[float] | None = None,
        steps: int | None = None,
        alpha: float | None = None,
        mode: AdversarialMode = "replace",
        ratio: float = 0.5,
        loss: AdversarialLoss | None = None,
        loss_weight: float | None = None,
        warmup_epochs: int = 0,
        input_space: InputSpace | None = None,
        eval_mode: bool = True,
        all_steps: bool = True,
        measure_every_n_batches: int = 50,
        overfitting_samples: int = 128,
        overfitting_checkpoint: str | None = None,
        forward_fn: Callable[..., Any] | None = None,
        batch_fn: Callable[..., Any] | None = None,
        seed: int = 0,
        prefix: str = "adversarial_training",
    ) -> None:
        super().__init__()
        check_option("mode", mode, AdversarialMode)
        check_share("ratio", ratio)
        check_functions(forward_fn, batch_fn)
        check_name("prefix", prefix)
        check_loss(loss, loss_weight, mode)
        counts = {"warmup_epochs": warmup_epochs, "overfitting_samples": overfitting_samples, "seed": seed}
        for name, value in counts.items():
            check_integer(name, value, minimum=0)
        for name, flag in {"eval_mode": eval_mode, "all_steps": all_steps}.items():
            check_flag(name, flag)
        check_integer("measure_every_n_batches", measure_every_n_batches, minimum=1)
        self.mode: AdversarialMode = mode
        self.ratio = ratio
        self.loss = loss
        self.loss_weight = loss_weight
        self.warmup_epochs = warmup_epochs
        self.input_space = check_input_space(input_space)
        self.eval_mode = eval_mode
        self.measure_every_n_batches = measure_every_n_batches
        self.overfitting_samples = overfitting_samples
        self.overfitting_checkpoint = overfitting_checkpoint
        self.forward_fn = forward_fn
        self.batch_fn = batch_fn
        self.seed = seed
        self.prefix = prefix
        if loss is not None and isinstance(attack, str) and attack == "pgd":
            attack = published_attack(loss)
        self._attacks = make_inner_attacks(attack, eps, steps, alpha, all_steps, self.input_space)
        self.attack = self._attacks[0]
        self._is_one_step = isinstance(self.attack, PGD) and self.attack.steps == 1
        if overfitting_checkpoint is not None and not (self._is_one_step and overfitting_samples):
            raise ValueError(
                "Expected argument `overfitting_checkpoint` with PGD of one step and `overfitting_samples` above 0, "
                f"which the sign is looked for with, but got {self.attack!r} and {overfitting_samples}. Leave it out."
            )
        self._num_batches = 0
        self._overfitting = CatastrophicOverfitting()
        self._means = EpochMeans()
        self._is_measured = False
        self._extra: ExtraInputs | None = None
        self._extras: dict[str, Tensor] = {}
        # How the network takes the entries of a batch, by their names
        self._ways: dict[tuple[str | None, tuple[str, ...]], ExtraInputs | None] = {}
        self._is_first = True
        self._has_warned = False
        self._probe: list[tuple[Tensor, Tensor]] = []

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(prefix=self.prefix)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self._num_batches, "overfitting": asdict(self._overfitting)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_batches = state_dict["num_batches"]
        self._overfitting = CatastrophicOverfitting(**state_dict["overfitting"])

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._probe, self._means, self._ways, self._is_first = [], EpochMeans(), {}, True
            if trainer.current_epoch == 0:  # another run; one that is resumed gets its state after this
                self._num_batches, self._overfitting = 0, CatastrophicOverfitting()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._choose_attack(trainer)  # not at the start of an epoch, which a run that is resumed within one is behind
        self._num_batches += 1
        self._is_measured = batch_idx % self.measure_every_n_batches == 0

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch < self.warmup_epochs:
            return
        self._choose_attack(trainer)  # a run that is resumed at the end of an epoch has had no batch of it
        values: dict[str, Any] = self._means.compute(trainer.strategy)
        budget = budget_of(self.attack, self.input_space)
        if budget is not None:
            values["eps"] = float(budget.eps)
        if self._probe:
            x, y = (torch.cat(tensors) for tensors in zip(*self._probe, strict=True))
            values |= self._look_for_overfitting(trainer, pl_module, x, y)
        self._probe = []
        pl_module.log_dict({f"{self.prefix}/{name}": value for name, value in values.items()}, sync_dist=True)

    @override
    def around_training_step(
        self, trainer: Trainer, pl_module: LightningModule, step: Callable[..., Any], batch: Any, *args: Any
    ) -> Any:
        if trainer.current_epoch < self.warmup_epochs:
            return step(batch, *args)
        x, y = read_labelled_batch(batch, self.batch_fn, needed_by="the attack", soft=self.loss is None)
        index = (self._num_batches - 1) * trainer.world_size + trainer.global_rank
        rows = self._choose_rows(x, index)
        clean, labels = (x, y) if rows is None else (x[rows], y[rows])
        self._take_extras(pl_module, batch, len(x), rows)
        clean = self._clip(clean)
        x_adv = self._perturb(pl_module, clean, labels, index)
        if self._is_measured:
            self._measure(pl_module, clean, x_adv, labels)
        self._keep_for_later(clean, labels)
        if self.loss is None:
            output = step(replace_in_batch(batch, self._combine(x, x_adv, rows), self.batch_fn), *args)
            loss = find_loss(output)
        else:
            new = partial(compute_loss, self.loss, self.loss_weight, self._forward(pl_module), x, y, x_adv)
            output, loss = step_with_loss(trainer, pl_module, partial(step, batch, *args), new)
        if loss is not None:
            self._means.add("loss", loss, len(x))
        return output

    def _take_extras(self, pl_module: LightningModule, batch: Any, num_samples: int, rows: Tensor | None) -> None:
        """Find what else the network takes from the batch, such as a mask."""
        name, extras = read_extras(batch, self.batch_fn, num_samples)
        names = name, tuple(extras)
        if names not in self._ways:
            function = pl_module if self.forward_fn is None else partial(self.forward_fn, pl_module)
            self._ways[names] = find_extra_inputs(function, name, extras)
        self._extra = self._ways[names]
        self._extras = extras if rows is None else {key: value[rows] for key, value in extras.items()}

    def _forward(self, pl_module: LightningModule) -> Callable[..., Any]:
        forward = forward_of(pl_module, self.forward_fn)
        return forward if self._extra is None else self._extra.bind(forward, self._extras)

    def _choose_attack(self, trainer: Trainer) -> None:
        epoch = max(trainer.current_epoch - self.warmup_epochs, 0)
        self.attack = self._attacks[min(epoch, len(self._attacks) - 1)]

    def _choose_rows(self, x: Tensor, index: int) -> Tensor | None:
        if self.mode != "mix":
            return None
        # In train mode, BatchNorm needs two
        number = max(round(self.ratio * len(x)), 1 if self.eval_mode else min(2, len(x)))
        order = np.random.default_rng([self.seed, index]).permutation(len(x))
        return torch.as_tensor(order[:number], device=x.device)

    def _perturb(self, pl_module: LightningModule, x: Tensor, y: Tensor, index: int) -> Tensor:
        forward, attack = self._forward(pl_module), self.attack
        if self._is_measured or not isinstance(attack, Attack):
            checked = open_classifier(forward, x, y, self.input_space, self.seed, index, self.eval_mode, precise=False)
            with checked as (classifier, x, y):
                return craft(attack, classifier, x, y).x_adv
        # The same without checks, whose results would have to come from the device, and without a copy of the inputs
        with sandbox(forward, y, seed=self.seed, index=index, eval_mode=self.eval_mode, precise=False) as (y,):
            x, rows = x.detach(), torch.arange(len(x), device=x.device)
            classifier = Classifier(forward, self.input_space, x, -1, Draws(rows, self.seed, index))
            return classifier.normalize(attack.perturb(classifier, classifier.unnormalize(x), y.long()).x_adv)

    def _clip(self, x: Tensor) -> Tensor:
        """Put values a little outside of the range into it; augmentation may produce some, hours into a run."""
        space, is_first = self.input_space, self._is_first
        self._is_first = False
        if is_first:
            space.check_normalized(x)
        if not x.is_floating_point():
            space.check(x)  # which refuses it
        if space.contains(x):
            self._means.add("clipped", 0.0, len(x))
            return x
        clipped, outside = space.clip(x)
        if is_first and space.is_mistaken(x, outside):
            space.check(x)
        space.check(clipped)
        self._means.add("clipped", outside.flatten(1).any(dim=1).float().mean(), len(x))
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"Some inputs of a training batch leave the range [{space.low}, {space.high}], as augmentation can "
                f"make them. They are clipped for the attack; `{self.prefix}/clipped` has their share."
            )
        return clipped

    def _combine(self, x: Tensor, x_adv: Tensor, rows: Tensor | None) -> Tensor:
        if rows is not None:
            return x.detach().clone().index_copy_(0, rows, x_adv)
        return torch.cat([x, x_adv]) if self.mode == "concat" else x_adv

    def _measure(self, pl_module: LightningModule, x: Tensor, x_adv: Tensor, y: Tensor) -> None:
        forward = self._forward(pl_module)
        with sandbox(forward, x, x_adv, seed=self.seed) as inputs, torch.no_grad():
            right, adv_right = (compute_logits(forward, rows).argmax(dim=1) == y for rows in inputs)
        self._means.add("acc", adv_right.float().mean(), len(y))
        self._means.add("broken", (right & ~adv_right).sum() / right.sum(), right.sum())

    def _keep_for_later(self, x: Tensor, y: Tensor) -> None:
        missing = self.overfitting_samples - sum(len(labels) for _, labels in self._probe)
        takes_extras = self._extra is not None and bool(self._extra.names)
        if self._is_one_step and missing > 0 and not takes_extras:
            # Copies: the loader may use its memory again
            self._probe.append((x[:missing].detach().clone(), y[:missing].clone()))

    def _look_for_overfitting(
        self, trainer: Trainer, pl_module: LightningModule, x: Tensor, y: Tensor
    ) -> dict[str, float]:
        many = replace(cast(PGD, self.attack), alpha=None, steps=MANY_STEPS, start="uniform")
        right = [
            run_attack(
                self._forward(pl_module), attack, x, y, self.input_space, self.seed, trainer.global_rank
            ).adv_preds
            == y
            for attack in (self.attack, many)
        ]
        counts = torch.tensor([right[0].sum(), right[1].sum(), len(y)], device=x.device)
        *numbers, total = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        single, multi = (number / total for number in numbers)
        eps, checkpoint = cast(PGD, self.attack).eps, self.overfitting_checkpoint
        is_there = watch_for_overfitting(trainer, self._overfitting, single, multi, eps, checkpoint)
        return {"acc_pgd": multi, "overfitting": float(is_there)}

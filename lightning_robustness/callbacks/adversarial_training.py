from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_robustness._isolation.sandbox import sandbox
from lightning_robustness._lightning.embeddings import embed, find_layer, perturbed
from lightning_robustness._lightning.guard import check_alone
from lightning_robustness._lightning.inner_attack import (
    MANY_STEPS,
    CatastrophicOverfitting,
    Clipping,
    make_inner_attacks,
    perturb,
)
from lightning_robustness._lightning.settings import AdversarialLoss, AdversarialSettings, Combine
from lightning_robustness._lightning.training_step import (
    TrainingStepCallback,
    compute_loss,
    find_loss,
    log_mean,
    published_attack,
    step_with_loss,
)
from lightning_robustness._model.access import Access, compute_logits
from lightning_robustness._model.batch import Batch, replace_in_batch, require_labels
from lightning_robustness.attacks import PGD, Attack, budget_of, run_attack
from lightning_robustness.input_space import InputSpace


class AdversarialTraining(TrainingStepCallback):
    r"""Train on adversarial inputs, without a change to the module or the data.

    Before each ``training_step``, the inputs of its batch are attacked with the current network, and the step gets
    a new batch of the same type; the batch of the loader is left unchanged, and is what the hooks of other
    callbacks see. The network is attacked on a detached copy of the inputs, without autocast but with TF32 where torch
    is set to it, as in the step itself, and without a trace in its gradients, modes, BatchNorm statistics or random
    states. Automatic and manual optimization, gradient accumulation, clipping, mixed precision and DDP work as usual.

    At the end of each epoch it logs, as ``<prefix>/<key>``:

    - ``loss``: mean of the loss that ``training_step`` returns, on the batches that it got
    - ``adv_acc``: robust accuracy: accuracy in eval mode on the adversarial inputs, on some of the batches
    - ``asr``: attack success rate: share of the inputs classified correctly there that the attack broke
    - ``eps``: budget of the attack, where it has one
    - ``clipped``: share of the inputs with values outside the range, which were clipped for the attack
    - ``adv_acc_pgd``: for PGD of one step: accuracy at the end of the epoch under PGD with 5 steps
    - ``overfitting``: for PGD of one step: 1 where the sign of catastrophic overfitting is there, else 0

    Args:
        attack: Name of an attack (``"pgd"`` as Madry et al. train; ``"fast"``: one step of 1.25 eps from a random
            start, as Wong et al. do; ``"cw"``, or another one that ``get_attack`` knows), an attack, or any other
            callable ``(model, x, y) -> x_adv`` on un-normalised inputs.
        eps: Largest distance from the input, in un-normalised units; by default, as the attack has it.
        budgets: Instead of ``eps``, one for each epoch after the warm-up; the last one stays. Some may be 0, for epochs
            on clean inputs.
        steps: Number of steps; by default, as the attack has it.
        alpha: Size of a step; by default, as the attack has it.
        combine: ``"replace"`` trains on adversarial inputs alone; ``"mix"`` replaces the share ``ratio`` of each batch,
            drawn at random; ``"concat"`` puts the adversarial inputs behind the clean ones, in a batch of twice
            the size, in which labels and everything else that has one entry per sample are repeated.
        ratio: Share of adversarial inputs with ``"mix"``.
        loss: ``"trades"`` or ``"mart"`` to train on that loss, instead of the one that ``training_step`` computes on
            adversarial inputs. The step runs on the clean batch, for everything but its loss; the new one is the
            cross-entropy loss of the paper, with hard labels, and takes two more forward passes. Without other
            arguments, the attack is the one of the paper: PGD of 10 steps from a little noise.
        loss_weight: Weight of the divergence in that loss; by default 6 for TRADES and 5 for MART.
        warmup_epochs: Number of epochs at the beginning that are trained on clean batches. Nothing is logged in them: a
            ``ModelCheckpoint`` or ``EarlyStopping`` that monitors a key of this callback would end the run.
        input_space: Range and normalisation of the inputs; by default [0, 1], not normalised.
        eval_mode: Whether the network is attacked in eval mode, in which it is used later, or in train mode: with the
            statistics of the attacked batch, and dropout.
        all_steps: Whether a built-in attack takes all steps for all samples, as published. Without, samples stop where
            they are first misclassified, which is weaker and faster.
        measure_every_n_batches: How often ``adv_acc`` and ``asr`` are measured, by two forward passes; first on
            the first batch of an epoch.
        overfitting_samples: Number of an epoch's first inputs on which PGD of one step is compared with 5 steps at its
            end, where the network takes inputs alone; 0 for no comparison.
        overfitting_checkpoint: Where to keep a checkpoint of the last epoch before catastrophic overfitting, one in
            which accuracy under 5 steps had not yet fallen; by default nowhere.
        forward_fn: Callable that takes the module and inputs and returns logits, where ``module(x)`` does not.
        embed_fn: Callable that takes the module and what the loader gives, such as tokens, and returns embeddings, the
            output of a layer: ``module.embedding(tokens)``. They are what is attacked then, in a space without bounds
            unless ``input_space`` has some. ``training_step`` gets the batch of the loader, in which this layer returns
            the perturbed embeddings, so that its weights are trained too. ``forward_fn`` takes embeddings to logits; by
            default ``module(inputs_embeds=...)`` if it has such an argument.
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
        eps: float | None = None,
        *,
        budgets: Sequence[float] | None = None,
        steps: int | None = None,
        alpha: float | None = None,
        combine: Combine = "replace",
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
        embed_fn: Callable[..., Any] | None = None,
        batch_fn: Callable[..., Any] | None = None,
        seed: int = 0,
        prefix: str = "adversarial_training",
    ) -> None:
        super().__init__(Access(input_space, forward_fn=forward_fn, embed_fn=embed_fn, batch_fn=batch_fn))
        if isinstance(loss, str) and isinstance(attack, str) and attack == "pgd":
            attack = published_attack(loss)
        self.settings = AdversarialSettings(
            attacks=make_inner_attacks(attack, eps, budgets, steps, alpha, all_steps, self.access.input_space),
            combine=combine,
            ratio=ratio,
            loss=loss,
            loss_weight=loss_weight,
            warmup_epochs=warmup_epochs,
            eval_mode=eval_mode,
            measure_every_n_batches=measure_every_n_batches,
            overfitting_samples=overfitting_samples,
            overfitting_checkpoint=overfitting_checkpoint,
            seed=seed,
            prefix=prefix,
        )
        self.attack = self.settings.attacks[0]
        self._overfitting = CatastrophicOverfitting()
        self._begin()

    def _begin(self) -> None:
        """Forget what belongs to a single run."""
        self._clip = Clipping(self.access.input_space, self._key("clipped"))
        self._layer: nn.Module | None = None  # that makes the embeddings
        self._is_measured = False
        self._probe: list[Batch] = []

    def _key(self, name: str) -> str:
        return f"{self.settings.prefix}/{name}"

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(prefix=self.settings.prefix)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"overfitting": asdict(self._overfitting)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._overfitting = CatastrophicOverfitting(**state_dict["overfitting"])

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            check_alone(trainer, self, self.settings.prefix)
            self._begin()
            if trainer.current_epoch == 0:  # another run; one that is resumed gets its state after this
                self._overfitting = CatastrophicOverfitting()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not at the start of an epoch, which a run that is resumed within one is behind
        self.attack = self.settings.attack_at(trainer.current_epoch)
        self._is_measured = batch_idx % self.settings.measure_every_n_batches == 0

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch < self.settings.warmup_epochs:
            return
        # A run that is resumed at the end of an epoch has had no batch of it
        self.attack = self.settings.attack_at(trainer.current_epoch)
        values: dict[str, float] = {}
        budget = budget_of(self.attack, self.access.input_space)
        if budget is not None:
            values["eps"] = float(budget.eps)
        if self._probe:
            values |= self._look_for_overfitting(trainer, pl_module)
        self._probe = []
        pl_module.log_dict({self._key(name): value for name, value in values.items()}, sync_dist=True)

    @override
    def around_training_step(
        self, trainer: Trainer, pl_module: LightningModule, step: Callable[..., Any], batch: Any, *args: Any
    ) -> Any:
        settings = self.settings
        if trainer.current_epoch < settings.warmup_epochs:
            return step(batch, *args)
        given = self.access.read(batch, soft=settings.loss is None)
        require_labels(given.y, "the attack")
        loaded = self.as_floats(pl_module, given)
        index = self.index_of_batch(trainer)
        clean = loaded._replace(x=self._embed(pl_module, loaded.x))
        rows = self._choose_rows(given.x, index)
        x_adv = self._attack(pl_module, clean if rows is None else clean.rows(rows), index)
        if settings.loss is None:
            x_adv = self._combine(clean.x, x_adv, rows)
            output = self._step(lambda new: step(new, *args), batch, given.x, clean.x, x_adv)
            loss = find_loss(output)
        else:
            own = loaded._replace(x=loaded.x.clone())  # a step may change its inputs in place
            make_loss = partial(self._compute_loss, pl_module, own, clean.x, x_adv)
            output, loss = step_with_loss(trainer, pl_module, partial(step, batch, *args), make_loss)
        if loss is not None:
            log_mean(pl_module, self._key("loss"), loss, len(given.x))
        return output

    def _embed(self, pl_module: LightningModule, x: Tensor) -> Tensor:
        """Return what is attacked: the inputs, or their embeddings."""
        embed_fn = self.access.embed_fn
        if embed_fn is None and not (x.is_floating_point() or x.is_complex()):
            raise TypeError(
                f"Expected inputs of floating point for the attack but got {x.dtype}. For pixels that the module "
                "converts itself, pass `input_space=InputSpace(high=255)`, with `eps` in grey levels; for tokens, "
                "`embed_fn=`, a callable that takes the module and tokens and returns their embeddings."
            )
        if embed_fn is None:
            return x
        if self._layer is None and self.settings.loss is None:
            self._layer = find_layer(pl_module, embed_fn, x)
        return embed(pl_module, embed_fn, x, self.settings.eval_mode)

    def _choose_rows(self, x: Tensor, index: int) -> Tensor | None:
        if self.settings.combine != "mix":
            return None
        # In train mode, BatchNorm needs two
        number = max(round(self.settings.ratio * len(x)), 1 if self.settings.eval_mode else min(2, len(x)))
        order = np.random.default_rng([self.settings.seed, index]).permutation(len(x))
        return torch.as_tensor(order[:number], device=x.device)

    def _attack(self, pl_module: LightningModule, batch: Batch, index: int) -> Tensor:
        settings = self.settings
        forward = self.forward(pl_module, batch)
        y = batch.labels()
        x, share = self._clip(batch.x)
        log_mean(pl_module, self._key("clipped"), share, len(x))
        space = self.access.input_space
        is_checked = self._is_measured
        x_adv, share = perturb(self.attack, forward, x, y, space, settings.seed, index, settings.eval_mode, is_checked)
        log_mean(pl_module, self._key("nonfinite_gradients"), share, len(x))
        if self._is_measured:
            self._measure(pl_module, forward, x, x_adv, y)
        self._keep_for_later(batch._replace(x=x))
        return x_adv

    def _combine(self, x: Tensor, x_adv: Tensor, rows: Tensor | None) -> Tensor:
        if rows is not None:
            return x.detach().clone().index_copy_(0, rows, x_adv)
        return torch.cat([x, x_adv]) if self.settings.combine == "concat" else x_adv

    def _step(self, step: Callable[..., Any], batch: Any, x: Tensor, clean: Tensor, x_adv: Tensor) -> Any:
        """Run the step on a batch with the new inputs, or on the batch of the loader with the new embeddings."""
        if self._layer is None:
            return step(replace_in_batch(batch, x_adv, self.access.batch_fn))
        times = len(x_adv) // len(x)
        batch = batch if times == 1 else replace_in_batch(batch, torch.cat([x] * times), self.access.batch_fn)
        with perturbed(self._layer, x_adv - torch.cat([clean] * times)):
            return step(batch)

    def _compute_loss(self, pl_module: LightningModule, batch: Batch, clean: Tensor, x_adv: Tensor) -> Tensor:
        x = batch.x
        embed_fn = self.access.embed_fn
        if embed_fn is not None:  # once more, for gradients of its weights
            x = embed_fn(pl_module, x)
            x_adv = x + (x_adv - clean)
        forward, loss = self.forward(pl_module, batch), cast(AdversarialLoss, self.settings.loss)
        return compute_loss(loss, self.settings.loss_weight, forward, x, batch.labels(), x_adv)

    def _measure(
        self, pl_module: LightningModule, forward: Callable[..., Any], x: Tensor, x_adv: Tensor, y: Tensor
    ) -> None:
        with sandbox(forward, x, x_adv, seed=self.settings.seed) as inputs, torch.no_grad():
            right, adv_right = (compute_logits(forward, rows).argmax(dim=1) == y for rows in inputs)
        log_mean(pl_module, self._key("adv_acc"), adv_right.float().mean(), len(y))
        num_right = int(right.sum())
        log_mean(pl_module, self._key("asr"), (right & ~adv_right).sum() / max(num_right, 1), num_right)

    def _keep_for_later(self, batch: Batch) -> None:
        missing = self.settings.overfitting_samples - sum(len(kept.x) for kept in self._probe)
        takes_inputs_alone = self.access.embed_fn is None and not self.extra_names(batch)
        if self.settings.looks_for_overfitting and missing > 0 and takes_inputs_alone:
            # Copies: the loader may use its memory again
            x, y = batch.x[:missing].detach().clone(), batch.labels()[:missing].clone()
            self._probe.append(Batch(x, y, batch.name))

    def _look_for_overfitting(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        x, y = (torch.cat(tensors) for tensors in zip(*((kept.x, kept.labels()) for kept in self._probe), strict=True))
        forward = self.forward(pl_module, self._probe[0])
        attack = cast(PGD, self.attack)
        many = replace(attack, alpha=None, steps=MANY_STEPS, start="uniform")
        options: dict[str, Any] = {"seed": self.settings.seed, "index": trainer.global_rank}
        right = [
            run_attack(forward, each, x, y, input_space=self.access.input_space, **options).adv_preds == y
            for each in (attack, many)
        ]
        counts = torch.tensor([right[0].sum(), right[1].sum(), len(y)], device=y.device)
        *numbers, total = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        single, multi = (number / total for number in numbers)
        path = self.settings.overfitting_checkpoint
        is_there = self._overfitting.watch(trainer, single, multi, attack.eps, path)
        return {"adv_acc_pgd": multi, "overfitting": float(is_there)}

"""Attack a few samples once more, for the pictures of a report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_robustness._measurement.meters.attack import AttackMeter, Examples
from lightning_robustness._measurement.subject import Samples, Subject
from lightning_robustness._processes import Processes


def attack_examples(
    name: str, attack: Callable[..., Any], subject: Subject, samples: Samples, positions: Tensor, processes: Processes
) -> Examples | None:
    """Attack some samples again in a single batch, which gives the same images in any number of processes."""
    own = samples.select(torch.isin(samples.positions, positions).nonzero().squeeze(1))
    shares = processes.gather(own)
    examples: Examples | None = None
    with processes.step():
        owners = [rank for rank, share in enumerate(shares) if len(share.positions)]
        if owners[:1] == [processes.rank]:  # a process without samples does not know the model well enough
            meter = AttackMeter({name: attack}, subject.input_space, num_examples=len(positions), gathers=False)
            meter.update(name, replace(subject, progress=False), _join(shares))
            examples = meter.examples.get(name)
    return next((found for found in processes.gather(examples) if found is not None), None)


def _join(shares: Sequence[Samples]) -> Samples:
    """Put the samples of all processes in the order of their positions."""
    shares = [share for share in shares if len(share.positions)]
    joined = Samples(
        [row for share in shares for row in share.x],
        torch.cat([share.labels() for share in shares]),
        torch.cat([share.positions for share in shares]),
        None if shares[0].extras is None else [row for share in shares for row in share.extras or ()],
    )
    return joined.select(joined.positions.argsort())

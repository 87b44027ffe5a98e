"""Monitor a network on non-image inputs: sounds with values in [-1, 1].

The only difference is ``input_space=``, the range of the inputs. The sounds are synthetic: tones of four instruments
at random pitch. Takes about half a minute on two cores: ``python examples/text_or_audio.py``.

Tokens of a text cannot be perturbed slightly, but their embeddings can: pass ``embed_fn=`` to the monitor, as
docs/monitor.md shows. If the embeddings are frozen, the loader can return them instead, of shape ``(N, length,
features)``; then pass ``InputSpace(low=None, high=None)``, since they are unbounded.
"""

import argparse
import math
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_robustness import InputSpace, RobustnessMonitor

# Amplitudes of the overtones of each instrument: a flute, a clarinet, a violin, an organ
TIMBRES = [[1.0, 0.1, 0.0, 0.0], [1.0, 0.0, 0.6, 0.3], [1.0, 0.7, 0.5, 0.4], [1.0, 0.8, 0.0, 0.7]]


def sounds(number: int, seed: int) -> TensorDataset:
    """Make noisy tones of 512 samples at 8 kHz, of shape (1, 512), labelled with the instrument."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(TIMBRES), (number,), generator=generator)
    pitch = 200 + 300 * torch.rand(number, 1, 1, generator=generator)
    phase = 2 * math.pi * torch.rand(number, 4, 1, generator=generator)
    overtones = torch.arange(1, 5).unsqueeze(1)
    tones = torch.sin(2 * math.pi * pitch * overtones * torch.arange(512) / 8000 + phase)
    waves = (tones * torch.tensor(TIMBRES)[labels].unsqueeze(2)).sum(dim=1, keepdim=True)
    waves = waves + 0.3 * torch.randn(waves.shape, generator=generator)
    return TensorDataset(waves / waves.abs().amax(dim=2, keepdim=True), labels)


class Listener(L.LightningModule):
    """A network of one-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv1d(1, 32, 64, stride=8),
            nn.ReLU(),
            nn.Conv1d(32, 64, 8, stride=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(64, len(TIMBRES)),
        )

    def forward(self, waves: Tensor) -> Tensor:
        return self.network(waves)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        waves, labels = batch
        return nn.functional.cross_entropy(self(waves), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        waves, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self(waves), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> None:
    """Train, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is in memory
    L.seed_everything(0)

    space = InputSpace(low=-1.0, high=1.0)
    # SirenAttack, a particle swarm for audio, takes many forward passes, so attack fewer samples
    monitor = RobustnessMonitor(attacks=("pgd", "siren"), eps=0.02, attack_samples=100, input_space=space)

    trainer = L.Trainer(max_epochs=epochs, callbacks=[monitor], enable_model_summary=False, log_every_n_steps=10)
    train_loader = DataLoader(sounds(2000, seed=0), batch_size=64, shuffle=True)
    trainer.fit(Listener(), train_loader, DataLoader(sounds(500, seed=1), batch_size=100))

    print("\nepoch  accuracy     RDI  Fisher     PGD   siren      (accuracy under attack: PGD, siren)")
    for row in monitor.history:
        values = [row.get(key) for key in ("acc", "rdi", "fim", "adv_acc/pgd", "adv_acc/siren")]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        print(f"{row['epoch']:5d}  {cells[0]:>8}  " + "  ".join(f"{cell:>6}" for cell in cells[1:]))
    print("\nFor the waves before and after the attacks, see the images:  tensorboard --logdir lightning_logs")


if __name__ == "__main__":
    main()

"""The speech side of the RDI paper: networks on waveforms, under SirenAttack.

The words are synthetic, since recordings would have to be downloaded: each is a pair of vowels, made from a pulse train
of random pitch by resonances at the formants of a random speaker, with noise. Takes about five minutes on one core:
``python benchmarks/paper_tables/speech.py --work DIRECTORY``. Trained networks are kept in the directory, results in
``benchmarks/results/paper_tables_speech.json``; a run that is interrupted goes on where it was, and ``--only m5``
repeats the networks with this in their names.
"""

import argparse
import json
import logging
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path

import lightning as L
import torch
from architectures import MeanOfPatches
from measure import RESULTS, rounded
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from train import Classifier

from lightning_robustness import AdversarialTraining, InputSpace
from lightning_robustness.attacks import get_attack
from lightning_robustness.evaluation import evaluate

RATE, LENGTH = 8000, 2048
# First and second formants of i, a, u, e, o in Hz
VOWELS = ((280, 2250), (730, 1090), (300, 870), (530, 1840), (570, 840))
WORDS = list(permutations(range(len(VOWELS)), 2))[::2]
SPACE = InputSpace(low=-1.0, high=1.0)
# Budget of adversarial training, of the verdict, and of SirenAttack where that of the paper breaks everything
EPS = 0.02


def synthesize(number: int, seed: int) -> TensorDataset:
    """Make words of shape (1, 2048) with values in [-1, 1], labelled by the pair of vowels."""
    generator = torch.Generator().manual_seed(seed)
    uniform = partial(torch.rand, generator=generator)
    labels = torch.randint(len(WORDS), (number,), generator=generator)
    pitch, speaker = 90 + 130 * uniform(number, 1, 1), 0.8 + 0.4 * uniform(number, 1, 1)
    change = LENGTH * (0.35 + 0.3 * uniform(number, 1, 1))
    formants = torch.tensor(VOWELS, dtype=torch.float32)[torch.tensor(WORDS)[labels]] * speaker  # word, vowel, formant
    t = torch.arange(LENGTH)
    harmonics = torch.arange(1, 26).reshape(1, -1, 1)
    frequencies = pitch * harmonics
    share = torch.sigmoid((t - change) / 100)  # glides from the first vowel to the second
    gains = [_gain(frequencies, formants[:, vowel]) for vowel in (0, 1)]
    phase = 2 * math.pi * (frequencies * t / RATE + uniform(number, 25, 1))
    audible = (frequencies < RATE / 2).float()
    waves = ((gains[0] * (1 - share) + gains[1] * share) * audible * phase.sin()).sum(dim=1, keepdim=True)
    waves = waves / waves.square().mean(dim=2, keepdim=True).sqrt()
    waves = waves + torch.randn(waves.shape, generator=generator)
    return TensorDataset(waves / waves.abs().amax(dim=2, keepdim=True), labels)


def _gain(frequencies: Tensor, formants: Tensor) -> Tensor:
    """Amplitudes of the harmonics of a vowel, from resonances of 120 Hz."""
    distance = (frequencies - formants.unsqueeze(1)) / 120
    return (1 / (1 + distance.square())).sum(dim=2, keepdim=True)


class AttentionPooling(nn.Module):
    """The mean over time, weighted by a learned score; from shape ``(N, channels, time)``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.score = nn.Conv1d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.score(x).softmax(dim=2)).sum(dim=2)


class Spectrogram(nn.Module):
    """Log-magnitudes of the short-time Fourier transform, of shape ``(N, 1, frequencies, frames)``."""

    def forward(self, x: Tensor) -> Tensor:
        window = torch.hann_window(128, dtype=x.dtype, device=x.device)
        frames = (x[:, 0].unfold(1, 128, 64) * window).transpose(1, 2)
        spectrum = torch.fft.rfft(frames, dim=1)
        return (spectrum.real.square() + spectrum.imag.square() + 1e-4).log().unsqueeze(1)


class Frames(nn.Module):
    """Learned embeddings of frames of the waveform, with positions; of shape ``(N, frames, width)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Conv1d(1, width, 64, 16), nn.ReLU(), nn.Conv1d(width, width, 8, 4))
        self.positions = nn.Parameter(0.02 * torch.randn(30, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).transpose(1, 2) + self.positions


def _m5_layers() -> list[nn.Module]:
    layers: list[nn.Module] = []
    width = 1
    for outputs, size, stride in ((32, 80, 8), (32, 3, 1), (64, 3, 1)):
        layers += [nn.Conv1d(width, outputs, size, stride, size // 2), nn.BatchNorm1d(outputs), nn.ReLU()]
        layers.append(nn.MaxPool1d(2))
        width = outputs
    return layers


def m5() -> nn.Sequential:
    """Convolutions of the waveform, and the mean over time."""
    return nn.Sequential(*_m5_layers(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(256, len(WORDS)))


def m5_attention() -> nn.Sequential:
    """Convolutions of the waveform, and attention over time."""
    return nn.Sequential(*_m5_layers(), AttentionPooling(64), nn.Linear(64, len(WORDS)))


def speech_cnn() -> nn.Sequential:
    """Convolutions of the spectrogram."""
    layers: list[nn.Module] = [Spectrogram()]
    width = 1
    for outputs in (8, 16, 32):
        layers += [nn.Conv2d(width, outputs, 3, 2, 1), nn.ReLU()]
        width = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 9 * 4, 64), nn.ReLU(), nn.Linear(64, len(WORDS)))


def speech_transformer(layers: int) -> nn.Sequential:
    """Self-attention over frames of the waveform."""
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    blocks = [nn.TransformerEncoderLayer(48, 4, 96, **options) for _ in range(layers)]
    return nn.Sequential(Frames(48), *blocks, nn.LayerNorm(48), MeanOfPatches(), nn.Linear(48, len(WORDS)))


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "m5-attention": m5_attention,
    "m5": m5,
    "speech-cnn": speech_cnn,
    "speech-transformer-1": partial(speech_transformer, 1),
    "speech-transformer-2": partial(speech_transformer, 2),
}
PLAN = [(name, False) for name in NETWORKS] + [("m5", True), ("speech-cnn", True)]


def train(name: str, is_robust: bool, data: TensorDataset, epochs: int) -> nn.Sequential:
    """Train naturally or against PGD, and return the network in eval mode."""
    L.seed_everything(0, verbose=False)
    module = Classifier(NETWORKS[name]())
    # Budgets grow: the whole one at once left a network that predicts a single class
    budgets = [EPS / 4, EPS / 2, EPS]
    callbacks = [AdversarialTraining("pgd", budgets=budgets, steps=5, input_space=SPACE)] if is_robust else []
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=epochs, callbacks=callbacks, logger=False, **quiet)
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True))
    return module.network.cpu().eval()


def measure(network: nn.Sequential, data: TensorDataset, attack_samples: int) -> dict[str, object]:
    """RDI, ROBY, Fisher information, distance to the boundary, and attacks."""
    attacks = {
        "siren": get_attack("siren", preset="speech"),
        "siren_small": get_attack("siren", eps=EPS),
        "pgd": get_attack("pgd", eps=EPS, strength="fast"),
    }
    loader = DataLoader(data, batch_size=64)
    options = {"eps": EPS, "input_space": SPACE, "fim_samples": 2 * attack_samples, "attack_samples": attack_samples}
    report = evaluate(network, loader, attacks=attacks, progress=False, **options)
    return {"metrics": report.metrics, "rates": {name: report.rates[name] for name in attacks}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for the trained networks")
    parser.add_argument("--output", type=Path, default=RESULTS / "paper_tables_speech.json")
    parser.add_argument("--only", help="repeat the networks whose names, such as m5.pgd, contain this")
    parser.add_argument("--samples", type=int, default=2000, help="number of words to train on")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--attacks", type=int, default=64, help="number of words to attack")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # these networks are too small for more
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    training, test = synthesize(arguments.samples, seed=0), synthesize(1000, seed=1)
    results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"networks": {}}
    sizes = {"samples": arguments.samples, "epochs": arguments.epochs, "attacks": arguments.attacks}
    results |= {"dataset": "synthetic words", "eps": EPS, "words": len(WORDS), "test": len(test), "sizes": sizes}
    for name, is_robust in tqdm(PLAN):
        full_name = f"{name}.{'pgd' if is_robust else 'natural'}"
        if full_name in results["networks"] if arguments.only is None else arguments.only not in full_name:
            continue
        start = time.process_time()
        path = arguments.work / "speech" / f"{full_name}.pt"
        if path.exists() and arguments.only is None:
            network = NETWORKS[name]().eval()
            network.load_state_dict(torch.load(path))
        else:
            network = train(name, is_robust, training, arguments.epochs)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(network.state_dict(), path)
        results["networks"][full_name] = rounded(measure(network, test, arguments.attacks))
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
        tqdm.write(f"{full_name}: {time.process_time() - start:.0f} s")

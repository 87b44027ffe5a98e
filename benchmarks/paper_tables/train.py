"""Train the networks behind the tables, and keep them outside of the repository.

``python benchmarks/paper_tables/train.py mnist --data DIRECTORY --work DIRECTORY`` trains 33 small networks on a subset
of MNIST in about twenty minutes on one core; ``fashion-mnist`` and ``cifar10`` are the other data sets. Without
``--data``, torchvision downloads them, where it is installed. A run that is interrupted goes on where it was, and
``--only vgg.pgd`` repeats the networks with this in their names. ``--samples 60000 --epochs 20``, on a GPU, is closer
to the papers.
"""

import argparse
import logging
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from architectures import ARCHITECTURES
from data import DATA_SETS, load
from plan import EPS, TRAININGS, Network, plan
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


class Classifier(L.LightningModule):
    """A network, trained with Adam and cross-entropy."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def train(network: Network, eps: float, images: Tensor, labels: Tensor, epochs: int) -> tuple[nn.Sequential, float]:
    """Train a network, and return it with the seconds of processor time that it took."""
    L.seed_everything(network.seed, verbose=False)
    module = Classifier(ARCHITECTURES[network.architecture](images.shape[1], images.shape[2]))
    make_callback = TRAININGS[network.training]
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[] if make_callback is None else [make_callback(eps)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.process_time()  # not of the clock, which also counts what else the machine does
    trainer.fit(module, DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True))
    return module.network.cpu().eval(), time.process_time() - start


def checkpoint(work: Path, dataset: str, network: Network) -> Path:
    """Where a network is kept."""
    return work / dataset / f"{network.name}.pt"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=DATA_SETS)
    parser.add_argument("--data", help="directory with the files of the data set")
    parser.add_argument("--work", type=Path, required=True, help="directory for the trained networks")
    parser.add_argument("--only", help="train the networks whose names contain this, again")
    parser.add_argument("--samples", type=int, default=8000, help="number of images to train on")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="these networks are too small for more")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    images, labels = (part[: arguments.samples] for part in load(arguments.dataset, arguments.data, train=True))
    networks = [network for network in plan() if arguments.only is None or arguments.only in network.name]
    for network in tqdm(networks, desc=arguments.dataset):
        path = checkpoint(arguments.work, arguments.dataset, network)
        settings = {"samples": len(images), "epochs": arguments.epochs}
        if arguments.only is None and path.exists() and torch.load(path)["settings"] == settings:
            continue
        trained, seconds = train(network, EPS[arguments.dataset], images, labels, arguments.epochs)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"settings": settings, "seconds": seconds, "state": trained.state_dict()}, path)
        tqdm.write(f"{network.name}: {seconds:.0f} s")

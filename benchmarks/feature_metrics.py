"""Cost of RDI and ROBY against the papers' loops and a forward pass, their memory, and the error of streaming.

Everything is measured in one run and printed as ratios: medians of repetitions, both sides in turn. Takes about five
minutes on two cores: ``python benchmarks/feature_metrics.py --data DIRECTORY``, where the directory holds the four
files of Fashion-MNIST (without ``--data``, torchvision downloads them, where it is installed). ``--parts 2 4`` runs
some of the parts; only part 5 needs Fashion-MNIST.
"""

import argparse
import time
from functools import partial

import torch
from fashion_mnist import load_fashion_mnist
from networks import resnet18, small_network, train
from sklearn.datasets import load_digits
from timing import record, seconds
from torch import Tensor

from lightning_robustness.functional import robustness_difference_index, roby
from lightning_robustness.metrics import ROBY, RobustnessDifferenceIndex


def rdi_loops(features: Tensor, preds: Tensor, num_classes: int) -> Tensor:
    """Algorithm 1 of the RDI paper, a Python step for each class and sample."""
    groups: list[list[Tensor]] = [[] for _ in range(num_classes)]
    for vector, label in zip(features, preds.tolist(), strict=True):
        groups[label].append(vector)
    centers, intra = [], []
    for group in groups:
        center = torch.zeros_like(features[0])
        for vector in group:
            center = center + vector
        center = center / len(group)
        total = torch.zeros(())
        for vector in group:
            total = total + torch.linalg.vector_norm(vector - center)
        centers.append(center)
        intra.append(total / len(group))
    overall = sum(centers) / num_classes
    inter = sum(torch.linalg.vector_norm(center - overall) for center in centers) / num_classes
    mean_intra = sum(intra) / num_classes
    return (inter - mean_intra) / max(inter, mean_intra)


def roby_loops(features: Tensor, preds: Tensor, num_classes: int) -> Tensor:
    """Algorithm 1 of the ROBY paper, a Python step for each sample and each pair of classes."""
    groups: list[list[Tensor]] = [[] for _ in range(num_classes)]
    for vector, label in zip(features, preds.tolist(), strict=True):
        groups[label].append(vector)
    centers, fsa = [], []
    for group in groups:
        center = torch.zeros_like(features[0])
        for vector in group:
            center = center + vector
        centers.append(center / len(group))
    for group, center in zip(groups, centers, strict=True):
        total = torch.zeros(())
        for vector in group:
            total = total + torch.linalg.vector_norm(vector - center)
        fsa.append(total / len(group))
    values = []
    for i in range(num_classes):
        for j in range(i + 1, num_classes):
            values.append(fsa[i] + fsa[j] - torch.linalg.vector_norm(centers[i] - centers[j]))
    stacked = torch.stack(values)
    return ((stacked - stacked.min()) / (stacked.max() - stacked.min())).mean()


def against_loops(classes: list[int]) -> None:
    """Compute of both metrics against the loops."""
    print("\n1. Whole computation, 512 dimensions: seconds, and how many times faster than the papers' loops")
    print("       K  samples      RDI     ROBY  ROBY/RDI  RDI: loops/ours  ROBY: loops/ours")
    for num_classes in classes:
        for num_samples in (10_000, 50_000):
            preds = torch.arange(num_samples) % num_classes
            features = torch.randn(num_samples, 512) + 3 * torch.randn(num_classes, 512)[preds]

            def ours_rdi(features: Tensor = features, preds: Tensor = preds) -> Tensor:
                return robustness_difference_index(features, preds)

            def ours_roby(features: Tensor = features, preds: Tensor = preds) -> Tensor:
                return roby(features, preds)

            ours = seconds({"rdi": ours_rdi, "roby": ours_roby}, repetitions=15)
            loops = dict.fromkeys(("rdi", "roby"), float("nan"))
            if num_samples == 10_000:  # the loops take minutes beyond
                for name, function, reference in (("rdi", rdi_loops, ours_rdi), ("roby", roby_loops, ours_roby)):
                    start = time.perf_counter()
                    value = function(features, preds, num_classes)
                    loops[name] = time.perf_counter() - start
                    torch.testing.assert_close(value, reference(), atol=1e-4, rtol=0)
                record(**{f"roby_{num_classes}": loops["roby"] / ours["roby"]})
            print(
                f"{num_classes:8d} {num_samples:8d}  {ours['rdi']:7.4f}  {ours['roby']:7.4f}  "
                f"{ours['roby'] / ours['rdi']:8.2f}  {loops['rdi'] / ours['rdi']:15.0f}  "
                f"{loops['roby'] / ours['roby']:16.0f}"
            )


def against_forward() -> None:
    """Update of both metrics against a forward pass."""
    print("\n2. Update of both metrics with a batch of 128 against the forward pass of a ResNet-18 at 32x32")
    network, images = resnet18(num_classes=10).eval(), torch.randn(128, 3, 32, 32)
    with torch.inference_mode():
        embedding = network[:-1](images)
        logits = network[-1](embedding)
    preds = logits.argmax(1)

    def forward() -> None:
        with torch.inference_mode():
            network(images)

    forward_seconds = seconds({"forward": forward}, repetitions=10)["forward"]
    for storage in ("exact", "streaming"):
        metrics = {RobustnessDifferenceIndex(10, storage=storage): logits, ROBY(10, storage=storage): embedding}
        start = time.perf_counter()
        for _ in range(600):  # the mean, since streaming does its work in blocks: 76,800 samples, more than it keeps
            for metric, features in metrics.items():
                metric.update(features, preds)
        update = (time.perf_counter() - start) / 600
        share = update / forward_seconds
        record(**{f"update_{storage}": share})
        print(f"   {storage:9s}: {1e3 * update:6.2f} ms of {1e3 * forward_seconds:7.1f} ms, {share:.2%}")


def memory_of_streaming() -> None:
    """State of the streaming mode after more and more samples."""
    print("\n3. State of both metrics in memory, K = 100, 512 dimensions (MB)")
    print("   samples  exact  streaming")
    for num_samples in (10_000, 50_000, 200_000):
        size = {}
        for storage in ("exact", "streaming"):
            metrics = RobustnessDifferenceIndex(100, storage=storage), ROBY(100, storage=storage)
            for _ in range(num_samples // 500):
                for metric in metrics:
                    metric.update(torch.randn(500, 512), torch.randint(100, (500,)))
            states = [getattr(metric, name) for metric in metrics for name in metric._defaults]
            tensors = [t for state in states for t in (state if isinstance(state, list) else [state])]
            size[storage] = sum(t.numel() * t.element_size() for t in tensors) / 2**20
        print(f"   {num_samples:7d}  {size['exact']:5.0f}  {size['streaming']:9.0f}")


def gaussians(counts: list[int]) -> tuple[Tensor, Tensor]:
    """Classes of several spreads, most of whose variance is in a few of 64 directions, in random order."""
    preds = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    preds = preds[torch.randperm(len(preds))]
    scales = torch.exp(-torch.arange(64) / 10) * (0.3 * torch.randn(len(counts), 1)).exp()
    noise = torch.randn(len(preds), 64) * (0.2 * torch.randn(len(preds), 1)).exp()
    return noise * scales[preds] + 0.3 * torch.randn(len(counts), 64)[preds], preds


def drifting(num_classes: int, per_class: int, jump: bool) -> tuple[Tensor, Tensor]:
    """Classes whose features move by twice their spread, steadily or at once."""
    features, preds = gaussians([per_class] * num_classes)
    time = torch.linspace(-1, 1, len(features)).unsqueeze(1)
    return features + 0.25 * torch.randn(num_classes, 64)[preds] * (time.sign() if jump else time), preds


def untrained(num_classes: int) -> tuple[Tensor, Tensor]:
    """The embedding of digits, with noise, in a network that was not trained."""
    images = torch.tensor(load_digits().data, dtype=torch.float32).repeat(50, 1) / 16
    images = (images + 0.1 * torch.randn_like(images))[torch.randperm(len(images))]
    network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU())
    with torch.inference_mode():
        embedding = network(images)
        return embedding, torch.nn.Linear(64, num_classes)(embedding).argmax(1)


def sorted_by_class() -> tuple[Tensor, Tensor]:
    """Balanced classes, one after the other."""
    features, preds = gaussians([6000] * 10)
    order = preds.argsort(stable=True)
    return features[order], preds[order]


def streaming_errors(features: Tensor, preds: Tensor, num_classes: int, batch_size: int) -> list[float]:
    """Streaming minus exact: RDI, ROBY with p = 2 and with p = inf."""
    errors = []
    for make in (
        lambda storage: RobustnessDifferenceIndex(num_classes, storage=storage),
        lambda storage: ROBY(num_classes, storage=storage),
        lambda storage: ROBY(num_classes, p=float("inf"), storage=storage),
    ):
        value = {}
        for storage in ("exact", "streaming"):
            metric = make(storage)
            for batch in zip(features.split(batch_size), preds.split(batch_size), strict=True):
                metric.update(*batch)
            value[storage] = metric.compute().item()
        errors.append(value["streaming"] - value["exact"])
    return errors


def error_of_streaming() -> None:
    """Streaming against exact where the centres move a lot, or where there is little to know them by."""
    print("\n4. Largest error of streaming over three seeds, 64 dimensions, batches of 200")
    print("                                        samples      RDI  ROBY p=2  ROBY p=inf")
    skewed = [20_000] * 4 + [2 + k % 40 for k in range(996)]
    for name, num_classes, make in (
        ("K = 1000, 50 samples of each", 1000, lambda: gaussians([50] * 1000)),
        ("K = 1000, 200 samples of each", 1000, lambda: gaussians([200] * 1000)),
        ("K = 1000, 4 large and 996 small", 1000, lambda: gaussians(skewed)),
        ("K = 10, untrained network", 10, lambda: untrained(10)),
        ("K = 1000, untrained network", 1000, lambda: untrained(1000)),
        ("K = 10, sorted by class", 10, sorted_by_class),
        ("K = 10, drift", 10, lambda: drifting(10, 10_000, jump=False)),
        ("K = 10, jump", 10, lambda: drifting(10, 10_000, jump=True)),
        ("K = 200, drift", 200, lambda: drifting(200, 500, jump=False)),
        ("K = 200, jump", 200, lambda: drifting(200, 500, jump=True)),
        ("K = 1000, drift", 1000, lambda: drifting(1000, 200, jump=False)),
        ("K = 1000, jump", 1000, lambda: drifting(1000, 200, jump=True)),
    ):
        errors = []
        for seed in range(3):
            torch.manual_seed(seed)
            features, preds = make()
            errors.append(streaming_errors(features, preds, num_classes, batch_size=200))
        rdi, roby_2, roby_inf = torch.tensor(errors).abs().amax(dim=0).tolist()
        print(f"   {name:35s} {len(features):8d}  {rdi:7.1e}   {roby_2:7.1e}     {roby_inf:7.1e}")


def error_on_images(directory: str | None) -> None:
    """Streaming against exact on the training set of Fashion-MNIST."""
    print("\n5. Error of streaming, batches of 32, a network trained on Fashion-MNIST, its 60,000 training images")
    images, labels = load_fashion_mnist(directory, train=True)
    network = train(small_network(num_classes=10), images, labels, epochs=2)
    with torch.inference_mode():
        embedding = torch.cat([network[:-1](batch) for batch in images.split(1000)])
        logits = network[-1](embedding)
    for layer, features in (("embedding", embedding), ("logits", logits)):
        rdi, roby_2, roby_inf = streaming_errors(features, logits.argmax(1), 10, batch_size=32)
        print(f"   {layer:9s}: RDI {rdi:+.1e}, ROBY p=2 {roby_2:+.1e}, ROBY p=inf {roby_inf:+.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with Fashion-MNIST's idx files")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="numbers of the parts to run")
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 200, 1000], help="of part 1")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    parts = (partial(against_loops, arguments.classes), against_forward, memory_of_streaming, error_of_streaming)
    for number, part in enumerate(parts, start=1):
        if number in arguments.parts:
            part()
    if 5 in arguments.parts:
        error_on_images(arguments.data)

"""What RDI and ROBY cost: against the papers' loops, a forward pass, and in memory; and how exact streaming is.

Everything is measured in one run and printed as ratios: medians of repetitions, both sides in turn. Takes about five
minutes on two cores: ``python benchmarks/feature_metrics.py --data DIRECTORY``, where the directory holds the four
files of Fashion-MNIST (without ``--data``, torchvision downloads them, where it is installed).
"""

import argparse
import time

import torch
from fashion_mnist import load_fashion_mnist
from networks import resnet18, small_network, train
from timing import seconds
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


def against_loops() -> None:
    """Compute of both metrics against the loops."""
    print("\n1. Whole computation, 512 dimensions: seconds, and how many times faster than the papers' loops")
    print("       K  samples      RDI     ROBY  ROBY/RDI  RDI: loops/ours  ROBY: loops/ours")
    for num_classes in (10, 100, 200, 1000):
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

    for mode in ("exact", "streaming"):
        rdi, roby_metric = RobustnessDifferenceIndex(10, mode=mode), ROBY(10, mode=mode)

        def forward() -> None:
            with torch.inference_mode():
                network(images)

        def update(rdi: RobustnessDifferenceIndex = rdi, roby_metric: ROBY = roby_metric) -> None:
            rdi.update(logits, preds)
            roby_metric.update(embedding, preds)

        times = seconds({"forward": forward, "update": update}, repetitions=40)
        share = times["update"] / times["forward"]
        print(f"   {mode:9s}: {1e3 * times['update']:6.2f} ms of {1e3 * times['forward']:7.1f} ms, {share:.2%}")


def memory_of_streaming() -> None:
    """State of the streaming mode after more and more samples."""
    print("\n3. State of both metrics in memory, K = 100, 512 dimensions (MB)")
    print("   samples  exact  streaming")
    for num_samples in (10_000, 50_000, 200_000):
        size = {}
        for mode in ("exact", "streaming"):
            metrics = RobustnessDifferenceIndex(100, mode=mode), ROBY(100, mode=mode)
            for _ in range(num_samples // 500):
                for metric in metrics:
                    metric.update(torch.randn(500, 512), torch.randint(100, (500,)))
            states = [getattr(metric, name) for metric in metrics for name in metric._defaults]
            tensors = [t for state in states for t in (state if isinstance(state, list) else [state])]
            size[mode] = sum(t.numel() * t.element_size() for t in tensors) / 2**20
        print(f"   {num_samples:7d}  {size['exact']:5.0f}  {size['streaming']:9.0f}")


def error_of_streaming(directory: str | None) -> None:
    """Streaming against exact on the test set of Fashion-MNIST."""
    print("\n4. Streaming against exact, batches of 32, a network trained on Fashion-MNIST, its 10,000 test images")
    images, labels = load_fashion_mnist(directory, train=True)
    network = train(small_network(num_classes=10), images, labels, epochs=2)
    with torch.inference_mode():
        embedding = network[:-1](load_fashion_mnist(directory, train=False)[0])
        logits = network[-1](embedding)
    preds = logits.argmax(1)
    for layer, features in (("embedding", embedding), ("logits", logits)):
        for name, make in (
            ("RDI", lambda mode: RobustnessDifferenceIndex(10, mode=mode)),
            ("ROBY p=2", lambda mode: ROBY(10, mode=mode)),
            ("ROBY p=inf", lambda mode: ROBY(10, p=float("inf"), mode=mode)),
        ):
            value = {}
            for mode in ("exact", "streaming"):
                metric = make(mode)
                for batch in zip(features.split(32), preds.split(32), strict=True):
                    metric.update(*batch)
                value[mode] = metric.compute().item()
            error = value["streaming"] - value["exact"]
            print(f"   {name:10s} on {layer:9s}: exact {value['exact']:.4f}, streaming off by {error:+.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with Fashion-MNIST's idx files")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    against_loops()
    against_forward()
    memory_of_streaming()
    error_of_streaming(arguments.data)

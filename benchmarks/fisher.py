"""What the Fisher spectral norm costs against a forward pass and 20-step PGD, how exact it is, and in how much memory.

Everything is measured in one run and printed as ratios: medians of repetitions, both sides in turn. Takes about fifteen
minutes on two cores: ``python benchmarks/fisher.py --data DIRECTORY``, where the directory holds the four files of
Fashion-MNIST (without ``--data``, torchvision downloads them, where it is installed).
"""

import argparse
import resource
import subprocess
import sys

import torch
from fashion_mnist import load_fashion_mnist
from networks import resnet18, small_network, train
from timing import record, seconds
from torch import Tensor, nn

from lightning_robustness.functional import fisher_spectral_norm


def pgd(network: nn.Module, x: Tensor, steps: int = 20, eps: float = 8 / 255) -> Tensor:
    """Projected gradient descent with all steps on all samples: what a robustness evaluation costs otherwise."""
    with torch.no_grad():
        labels = network(x).argmax(1)
    adversarial = x
    for _ in range(steps):
        adversarial = adversarial.detach().requires_grad_()
        loss = nn.functional.cross_entropy(network(adversarial), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, adversarial)
        adversarial = (x + (adversarial + eps / 4 * gradient.sign() - x).clamp(-eps, eps)).clamp(0, 1)
    return adversarial.detach()


def peaked_resnet18(num_classes: int, x: Tensor) -> nn.Sequential:
    """A ResNet-18 whose head is scaled until predictions are as confident as a trained network's, 0.95 on average."""
    network = resnet18(num_classes).eval().requires_grad_(False)
    network.train()(x)  # statistics of BatchNorm
    network.eval()
    for _ in range(60):
        if network(x).softmax(1).amax(1).mean() > 0.95:
            break
        network[-1].weight.mul_(1.3)
    return network


def cost(repetitions: int) -> None:
    """Seconds of each method against forward pass and PGD."""
    print("\n3. ResNet-18 at 32x32, 32 samples, peaked outputs: cost in forward passes and relative to 20-step PGD")
    print("      K  method                products  forward passes  share of PGD-20  largest relative error")
    for num_classes in (10, 100, 1000):
        x = torch.rand(32, 3, 32, 32)
        network = peaked_resnet18(num_classes, x)
        variants = {
            "auto": {},
            "lanczos": {"method": "lanczos"},
            "lanczos, 1e-3": {"method": "lanczos", "tolerance": 1e-3},
        }

        def forward(network: nn.Module = network, x: Tensor = x) -> None:
            with torch.inference_mode():
                network(x)

        functions = {"forward": forward, "pgd": lambda network=network, x=x: pgd(network, x)}
        for name, options in variants.items():
            functions[name] = lambda n=network, x=x, options=options: fisher_spectral_norm(n, x, **options)
        times = seconds(functions, repetitions)
        reference = fisher_spectral_norm(network, x, "lanczos", tolerance=1e-12)
        record(**{f"fisher_{num_classes}": times["auto"] / times["pgd"]})
        print(f"{num_classes:7d}  20-step PGD                     {times['pgd'] / times['forward']:14.1f}")
        for name, options in variants.items():
            parts = fisher_spectral_norm(network, x, **options, return_components=True)
            error = ((parts.spectral_norm - reference).abs() / reference).max()
            print(
                f"{num_classes:7d}  {name:20s}  {parts.products.double().mean():8.1f}  "
                f"{times[name] / times['forward']:14.1f}  {times[name] / times['pgd']:15.2f}  {error:22.1e}"
            )


def accuracy(directory: str | None) -> None:
    """Lanczos against exact on trained networks, by the number of products."""
    print("\n2. Lanczos against exact on networks trained on Fashion-MNIST, 500 test images: relative error")
    print("      K  accuracy  products     mean  99th percentile  largest  outside of their residual bound")
    images, labels = load_fashion_mnist(directory, train=True)
    test_images, test_labels = load_fashion_mnist(directory, train=False)
    for num_classes in (10, 100):
        if num_classes == 100:  # which of a hundred images is the closest
            anchors = images[:100].flatten(1)
            labels = torch.cdist(images.flatten(1), anchors).argmin(1)
            test_labels = torch.cdist(test_images.flatten(1), anchors).argmin(1)
        network = train(small_network(num_classes), images, labels, epochs=3)
        x, y = test_images[:500], test_labels[:500]
        with torch.inference_mode():
            share = (network(x).argmax(1) == y).double().mean()
        exact = fisher_spectral_norm(network, x, "exact")
        for steps in (1, 2, 3, 4, 100):
            parts = fisher_spectral_norm(network, x, "lanczos", max_steps=steps, return_components=True)
            error = (parts.spectral_norm - exact).abs()
            outside = int((error > parts.residual + 1e-6 * exact).sum())
            error = error / exact
            name = f"{2 * steps}" if steps < 100 else f"{parts.products.double().mean():.1f}*"
            print(
                f"{num_classes:7d}  {share:8.3f}  {name:>8s}  {error.mean():7.0e}  {error.quantile(0.99):15.0e}  "
                f"{error.max():7.0e}  {outside:31d}"
            )
    print("   * on average, with the default tolerance of 1e-6")


def memory() -> None:
    """Peak memory of the exact method with and without chunks, and of Lanczos, each in a process of its own."""
    print("\n1. Peak memory beyond the network's own, 1000 classes, 128 samples of 3x32x32 (MB)")
    for name in ("exact in one piece", "exact", "lanczos"):
        result = subprocess.run([sys.executable, __file__, "--peak", name], capture_output=True, text=True, check=True)
        print(f"   {name:18s}  {float(result.stdout):6.0f}")


def print_peak(name: str) -> None:
    """Print how far the peak of this process rises during one call."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 15 * 15, 1000))
    x = torch.rand(128, 3, 32, 32)
    fisher_spectral_norm(network, x[:1], "lanczos")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    method, chunk_size = ("exact", 128) if name == "exact in one piece" else (name, None)
    fisher_spectral_norm(network, x, method, chunk_size=chunk_size)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="directory with Fashion-MNIST's idx files")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 3], help="numbers of the parts to run")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.peak:
        print_peak(arguments.peak)
    else:
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
        if 1 in arguments.parts:
            memory()
        if 2 in arguments.parts:
            accuracy(arguments.data)
        if 3 in arguments.parts:
            cost(arguments.repetitions)

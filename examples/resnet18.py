"""The ResNet-18 for 32x32 pixels that ``cifar10_resnet18.py`` trains."""

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        first = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        self.main = nn.Sequential(*first, nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))
        projection = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.shortcut = nn.Identity() if inputs == width and stride == 1 else projection

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.main(x) + self.shortcut(x))


def resnet18(width: int = 64, num_classes: int = 10) -> nn.Sequential:
    """Build a ResNet-18 whose first stage has ``width`` channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))

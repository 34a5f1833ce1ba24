"""Train a small ResNet to tell circles, squares, crosses and gratings apart.

    python examples/train_convnet.py --steps 400

The images are drawn as they are needed: a shape of random colour, place and size, on a random
background, under noise. Plain PyTorch. Results go to standard output, progress to standard error.
Two runs with the same options and number of threads give the same losses.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CLASSES = ("circle", "square", "cross", "grating")


class Shapes(Dataset[tuple[Tensor, int]]):
    """`count` images [3, size, size] with their class.

    An image depends on `seed` and its index alone, so it is the same whichever worker draws it.
    """

    def __init__(self, count: int, size: int, seed: int, noise: float = 0.1) -> None:
        self.count, self.size, self.seed, self.noise = count, size, seed, noise
        axis = torch.linspace(-1, 1, size)
        self.y, self.x = torch.meshgrid(axis, axis, indexing="ij")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)

        def uniform(low: float, high: float) -> float:
            return low + (high - low) * torch.rand((), generator=generator).item()

        label = index % len(CLASSES)
        mask = self._draw(CLASSES[label], uniform)
        ink = torch.rand(3, 1, 1, generator=generator)
        paper = (ink + 0.5) % 1  # always well apart from the ink
        image = torch.where(mask, ink, paper)
        image = image + self.noise * torch.randn(image.shape, generator=generator)
        return image - 0.5, label

    def _draw(self, name: str, uniform: Callable[[float, float], float]) -> Tensor:
        """Where the shape is, as a boolean [size, size], turned by a random angle."""
        angle, radius = uniform(0, math.pi), uniform(0.3, 0.6)
        x, y = self.x - uniform(-0.4, 0.4), self.y - uniform(-0.4, 0.4)
        cos, sin = math.cos(angle), math.sin(angle)
        x, y = cos * x + sin * y, cos * y - sin * x
        inside = torch.maximum(x.abs(), y.abs()) < radius
        if name == "circle":
            return torch.hypot(x, y) < radius
        if name == "square":
            return inside
        if name == "cross":
            return inside & (torch.minimum(x.abs(), y.abs()) < radius / 3)
        stripes = torch.sin(2 * math.pi * x / uniform(0.25, 0.5)) > 0
        return stripes & (torch.hypot(x, y) < radius)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18's plan (He et al. 2015, arXiv 1512.03385) with a stem for small images."""

    def __init__(self, width: int = 16, blocks: tuple[int, ...] = (2, 2, 2, 2)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        layers, inputs = [], width
        for stage, count in enumerate(blocks):
            outputs = width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(BasicBlock(inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, 3, height, width] to logits [batch, classes]."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def progress(steps: int, losses: list[float]) -> Iterator[int]:
    """Yield each step, and show the last of `losses` on standard error.

    A bar if `rich` is installed, else a line now and then.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:
        for step in range(steps):
            yield step
            if (step + 1) % max(1, steps // 20) == 0:
                print(f"step {step + 1}/{steps}  loss {losses[-1]:.3f}", file=sys.stderr)
        return
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=steps)
        for step in range(steps):
            yield step
            bar.update(task, advance=1, description=f"loss {losses[-1]:.3f}")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=400)
    add("--width", type=int, default=16, help="channels of the first stage")
    add("--size", type=int, default=32, help="height and width of the images")
    add("--batch", type=int, default=64)
    add("--lr", type=float, default=0.02)
    add("--weight-decay", type=float, default=5e-4)
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=0, help="CPU threads; 0: PyTorch's own choice")
    add("--workers", type=int, default=0, help="processes that draw images")
    add("--device", default="cpu")
    add("--test", type=int, default=512, metavar="N", help="images to measure the accuracy on")
    add("--losses", type=Path, metavar="FILE", help="write the loss of every step, as JSON")
    return parser


def build(args: argparse.Namespace) -> tuple[ResNet, DataLoader]:
    """The network, and the batches to train it on: new images at every step."""
    torch.manual_seed(args.seed)
    model = ResNet(args.width).to(args.device)
    images = Shapes(args.steps * args.batch, args.size, args.seed)
    return model, DataLoader(images, args.batch, num_workers=args.workers)


def train(args: argparse.Namespace, model: ResNet, batches: DataLoader) -> list[float]:
    """Train `model` for `args.steps` steps; the loss of each."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=args.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, args.steps))
    losses: list[float] = []
    model.train()
    for _, (images, labels) in zip(progress(args.steps, losses), batches, strict=True):
        loss = F.cross_entropy(model(images.to(args.device)), labels.to(args.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def accuracy(args: argparse.Namespace, model: ResNet) -> float:
    """The share of `args.test` images, none of them seen in training, that `model` gets right."""
    model.eval()
    right = 0
    for images, labels in DataLoader(Shapes(args.test, args.size, args.seed + 1), args.batch):
        guesses = model(images.to(args.device)).argmax(1)
        right += int((guesses == labels.to(args.device)).sum())
    return right / args.test


def main() -> None:
    args = options().parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, batches = build(args)
    losses = train(args, model, batches)
    if losses:
        print(f"loss {losses[-1]:.4f} after {len(losses)} steps")
    if args.losses:
        args.losses.write_text(json.dumps(losses) + "\n")
    if args.test:
        print(f"accuracy {accuracy(args, model):.1%} on {args.test} new images")


if __name__ == "__main__":
    main()

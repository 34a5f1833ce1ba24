"""The work that is compared: a chain of small ops, and training steps of the example models."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from harness import Options, autograd
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import train_convnet
import train_gpt

Loss = Callable[[], Tensor]


def chain_loss(length: int = 50, elements: int = 4, constant: bool = False) -> Loss:
    """`length` multiplications of `elements` elements, without a gradient from before: by the leaf
    itself (three kernels each in backward), or by a constant (one)."""
    x = torch.full((elements,), 1.01, requires_grad=True)
    factor = x.detach().clone() if constant else x

    def loss() -> Tensor:
        x.grad = None
        y = x
        for _ in range(length):
            y = y * factor
        return y.sum()

    return loss


def chain() -> Callable[[], None]:
    """The chain and its backward."""
    loss = chain_loss()
    return lambda: loss().backward()


class Training:
    """A model, its optimizer and one batch. Calling it makes one training step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: tuple[Tensor, ...],
        loss: Loss,
    ) -> None:
        self.model, self.optimizer, self.batch, self.loss = model, optimizer, batch, loss

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def fresh_loss(self) -> Tensor:
        """The loss, without gradients from before."""
        self.optimizer.zero_grad()
        return self.loss()

    def loss_of_first(self, length: int) -> Tensor:
        """As `fresh_loss`, of the first `length` of each sequence."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model.loss(*(part[:, :length] for part in self.batch))
        return loss

    def held(self) -> Iterator[Tensor]:
        """The tensors that are there between steps."""
        states = (v for state in self.optimizer.state.values() for v in state.values())
        for tensor in (*self.model.parameters(), *self.model.buffers(), *self.batch, *states):
            if isinstance(tensor, Tensor):
                yield tensor
                if tensor.grad is not None:
                    yield tensor.grad

    def check(self) -> None:
        """Raise unless both give the same gradients, to the bit."""
        found = []
        for record in (False, True):
            torch.manual_seed(0)
            self.optimizer.zero_grad()
            with autograd(record):
                self.loss().backward()
            found.append([p.grad for p in self.model.parameters()])
        for (name, _), a, b in zip(self.model.named_parameters(), *found, strict=True):
            if a is None or b is None or not torch.equal(a, b):
                raise SystemExit(f"the gradients of {name} differ: nothing to compare")


def gpt(options: Options, checkpoint: bool = False) -> Training:
    """The example's GPT in its default size: 6 layers, width 256, context 256, batch 4."""
    arguments = ["--layers", "2", "--width", "64", "--context", "64"] if options.quick else []
    args = train_gpt.options().parse_args(arguments)
    args.checkpoint = checkpoint
    model, corpus = train_gpt.build(args)
    generator = torch.Generator().manual_seed(args.seed)
    tokens, targets = corpus.batch(args.batch, args.context, generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def loss() -> Tensor:
        return model.loss(tokens, targets)

    return _checked(Training(model, optimizer, (tokens, targets), loss))


def convnet(options: Options) -> Training:
    """The example's ResNet-18, width 16, on 64 images of 32 x 32."""
    arguments = ["--width", "4", "--batch", "16"] if options.quick else []
    args = train_convnet.options().parse_args([*arguments, "--steps", "1"])
    model, batches = train_convnet.build(args)
    images, labels = next(iter(batches))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    return _checked(Training(model, optimizer, (images, labels), loss))


def _checked(training: Training) -> Training:
    training.model.train()
    training.check()
    return training


@contextmanager
def saving_to_files() -> Iterator[None]:
    """Within: every saved tensor goes to a file of its own by `torch.save`."""
    numbers = itertools.count()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:

        def pack(tensor: Tensor) -> Path:
            path = Path(folder) / str(next(numbers))
            torch.save(tensor, path)
            return path

        def unpack(path: Any) -> Tensor:
            tensor: Tensor = torch.load(path)
            return tensor

        with saved_tensors_hooks(pack, unpack):
            yield


def with_files(training: Training) -> Callable[[], None]:
    """A training step whose forward saves everything to files."""

    def work() -> None:
        training.optimizer.zero_grad()
        with saving_to_files():
            training.loss().backward()
        training.optimizer.step()

    return work

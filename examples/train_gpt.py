"""Train a small GPT, character by character, on the source of Python's standard library.

    python examples/train_gpt.py --steps 200 --sample 400

Plain PyTorch. Results go to standard output, progress to standard error. Two runs with the same
options and number of threads give the same losses.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass
class GPTConfig:
    vocabulary: int
    layers: int = 6
    width: int = 256
    heads: int = 8
    context: int = 256
    dropout: float = 0.1
    checkpoint: bool = False  # keep each block's input only, run the block again in backward


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [batch, time, 3, heads, head width]
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        # No dropout on the attention weights: PyTorch's fused kernel for the CPU has none.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """A pre-norm decoder; the output head shares its weight with the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [batch, time] to logits [batch, time, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            if self.config.checkpoint and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def sample(self, tokens: Tensor, count: int) -> Tensor:
        """Continue token ids [batch, time] by `count` tokens drawn from the model."""
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])[:, -1]
            drawn = torch.multinomial(logits.softmax(-1), num_samples=1)
            tokens = torch.cat([tokens, drawn], dim=1)
        return tokens


class Corpus:
    """A text as character ids, and random stretches of it."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        self._ids = {character: i for i, character in enumerate(self.characters)}
        self.data = self.encode(text)

    @classmethod
    def standard_library(cls, megabytes: float = 4.0) -> Corpus:
        """The top-level modules of the running Python's library, in the order of their names."""
        folder = Path(sysconfig.get_paths()["stdlib"])
        texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))]
        # A few files with other alphabets would multiply the vocabulary.
        text = "".join(text for text in texts if text.isascii())[: int(megabytes * 1e6)]
        if not text:
            raise SystemExit(f"no Python source found in {folder}")
        return cls(text)

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self._ids[character] for character in text])

    def decode(self, ids: Tensor) -> str:
        return "".join(self.characters[i] for i in ids.tolist())

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both [size, length]; a target is the character that comes next."""
        starts = torch.randint(len(self.data) - length, (size, 1), generator=generator)
        stretch = self.data[starts + torch.arange(length + 1)]
        return stretch[:, :-1], stretch[:, 1:]


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
    add("--steps", type=int, default=200)
    add("--layers", type=int, default=6)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=8)
    add("--context", type=int, default=256, help="characters the model sees at once")
    add("--batch", type=int, default=4)
    add("--lr", type=float, default=1e-3)
    add("--dropout", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=0, help="CPU threads; 0: PyTorch's own choice")
    add("--device", default="cpu")
    add("--megabytes", type=float, default=4.0, help="of source text to train on, at most")
    add("--checkpoint", action="store_true", help="recompute each block in backward")
    add("--sample", type=int, default=200, metavar="N", help="characters to write at the end")
    add("--losses", type=Path, metavar="FILE", help="write the loss of every step, as JSON")
    return parser


def build(args: argparse.Namespace) -> tuple[GPT, Corpus]:
    torch.manual_seed(args.seed)
    corpus = Corpus.standard_library(args.megabytes)
    model = GPT(
        GPTConfig(
            vocabulary=len(corpus.characters),
            layers=args.layers,
            width=args.width,
            heads=args.heads,
            context=args.context,
            dropout=args.dropout,
            checkpoint=args.checkpoint,
        )
    )
    return model.to(args.device), corpus


def train(args: argparse.Namespace, model: GPT, corpus: Corpus) -> list[float]:
    """Train `model` for `args.steps` steps; the loss of each."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )

    def rate(step: int) -> float:  # a short warm-up, then half a cosine down to a tenth
        warmup = min(1.0, (step + 1) / 20)
        return warmup * (0.55 + 0.45 * math.cos(math.pi * step / max(1, args.steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(args.seed)
    losses: list[float] = []
    model.train()
    for _ in progress(args.steps, losses):
        tokens, targets = corpus.batch(args.batch, args.context, generator)
        loss = model.loss(tokens.to(args.device), targets.to(args.device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    args = options().parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, corpus = build(args)
    losses = train(args, model, corpus)
    if losses:
        print(f"loss {losses[-1]:.4f} after {len(losses)} steps")
    if args.losses:
        args.losses.write_text(json.dumps(losses) + "\n")
    if args.sample:
        model.eval()
        prompt = corpus.encode("\ndef ")[None].to(args.device)
        print(corpus.decode(model.sample(prompt, args.sample)[0]))


if __name__ == "__main__":
    main()

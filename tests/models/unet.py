"""A small U-Net as diffusion models use it, in plain PyTorch.

Down: residual blocks and a strided convolution per level. Bottleneck: self-attention over pixels
between two blocks. Up: nearest-neighbour interpolation, and the activations of the way down joined
by `cat`. Every block is told the time step. After Ho et al. 2020 (arXiv 2006.11239).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def timestep_embedding(times: Tensor, width: int) -> Tensor:
    """Times [batch] to sines and cosines [batch, width] of frequencies from 1 to 1/10000."""
    exponents = torch.arange(width // 2, dtype=times.dtype, device=times.device) / (width // 2)
    angles = times[:, None] * torch.exp(-math.log(10_000) * exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.conv2(self.dropout(F.silu(self.norm2(y))))
        return y + self.shortcut(x)


class PixelAttention(nn.Module):
    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).flatten(2)  # [batch, 3 * channels, pixels]
        q, k, v = qkv.unflatten(1, (3, self.heads, -1)).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)  # [batch, heads, pixels, head width]
        return x + self.out(y.transpose(-1, -2).reshape(x.shape))


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class UNet(nn.Module):
    """Predicts the noise in images [batch, channels, h, w] at times [batch].

    `h` and `w` must be divisible by 2 ** (len(multipliers) - 1), each level's width by `groups`.
    """

    def __init__(
        self,
        channels: int = 3,
        width: int = 64,
        multipliers: Sequence[int] = (1, 2, 4),
        groups: int = 8,
        heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        time = 4 * width
        widths = [width * multiplier for multiplier in multipliers]

        def block(inputs: int, outputs: int) -> ResidualBlock:
            return ResidualBlock(inputs, outputs, time, groups, dropout)

        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        # One block a level on the way down, and as many on the way up, deepest level first.
        self.down_blocks = nn.ModuleList(map(block, [width, *widths[:-1]], widths))
        self.downs = nn.ModuleList(nn.Conv2d(w, w, 3, stride=2, padding=1) for w in widths[:-1])
        self.middle1 = block(widths[-1], widths[-1])
        self.attention = PixelAttention(widths[-1], heads, groups)
        self.middle2 = block(widths[-1], widths[-1])
        deepest_first = widths[::-1]
        arriving = [widths[-1], *deepest_first[:-1]]
        self.up_blocks = nn.ModuleList(
            block(below + skip, skip) for below, skip in zip(arriving, deepest_first, strict=True)
        )
        self.ups = nn.ModuleList(map(Upsample, deepest_first[:-1]))
        self.norm = nn.GroupNorm(groups, width * multipliers[0])
        self.out = nn.Conv2d(width * multipliers[0], channels, 3, padding=1)

    @classmethod
    def tiny(cls, dropout: float = 0.1) -> UNet:
        """Two levels, 33,000 parameters: milliseconds a step in float64 on 8 × 8 images."""
        return cls(channels=2, width=8, multipliers=(1, 2), groups=4, heads=2, dropout=dropout)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        time = self.time(timestep_embedding(times, self.width))
        x = self.stem(images)
        skips = []
        for level, block in enumerate(self.down_blocks):
            x = block(x, time)
            skips.append(x)
            if level < len(self.downs):
                x = self.downs[level](x)
        x = self.middle2(self.attention(self.middle1(x, time)), time)
        for level, block in enumerate(self.up_blocks):
            x = block(torch.cat([x, skips.pop()], dim=1), time)
            if level < len(self.ups):
                x = self.ups[level](x)
        return self.out(F.silu(self.norm(x)))

"""Saved tensors in host memory: off the accelerator after forward, back when backward needs them.

Copies are made on the current stream and waited for: simple, and as slow as the bus. Moving them
beside the computation needs a schedule of what is needed when, which a pair does not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .place import SMALLEST, Place


class _HostBytes:
    """Bytes in host memory."""

    __slots__ = ("flat",)

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat

    @property
    def nbytes(self) -> int:
        return self.flat.numel()

    def __repr__(self) -> str:
        return "host memory"


class ToHost(Place):
    """Pack: copy to host memory. Unpack: copy back to the device it came from.

    A tensor that is in host memory already stays as it is: on a machine without an accelerator
    this pair changes nothing and costs next to nothing. `pin_memory`: use page-locked memory,
    which copies faster and which the system cannot page out.
    """

    place = "host"

    def __init__(
        self,
        *,
        pin_memory: bool = False,
        smallest: int = SMALLEST,
        leave: Iterable[nn.Module | Tensor] = (),
    ) -> None:
        super().__init__(smallest=smallest, leave=leave)
        self.pin_memory = pin_memory

    def _stays(self, tensor: Tensor) -> str | None:
        if self._is_here(tensor):
            return "in host memory already"
        return super()._stays(tensor)

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def _store(self, flat: Tensor, dtype: torch.dtype, label: str) -> _HostBytes:
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=self.pin_memory)
        return _HostBytes(host.copy_(flat))

    def _load(self, handle: Any, nbytes: int, device: torch.device, label: str) -> Tensor:
        flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return flat.copy_(handle.flat)

    def _free(self, handle: Any) -> int:
        nbytes = handle.flat.numel()
        handle.flat = None
        return nbytes

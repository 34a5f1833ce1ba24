"""Ways of keeping less in memory between forward and backward. See README.md in this folder."""

from __future__ import annotations

from .disk import ToDisk
from .host import ToHost
from .recompute import Recompute
from .stow import Stow

__all__ = ["Recompute", "Stow", "ToDisk", "ToHost"]

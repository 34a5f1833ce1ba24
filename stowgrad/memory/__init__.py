"""Ways of keeping less in memory between forward and backward. See README.md in this folder."""

from __future__ import annotations

from .disk import ToDisk
from .host import ToHost
from .place import NoRoom, Place
from .policy import Keep, Policy, stow
from .recompute import Recompute

__all__ = ["Keep", "NoRoom", "Place", "Policy", "Recompute", "ToDisk", "ToHost", "stow"]

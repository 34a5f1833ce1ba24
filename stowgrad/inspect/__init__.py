"""What was saved and what it took: live bytes, time in backward, reports of a run."""

from __future__ import annotations

from .meter import BackwardClock, Meter

__all__ = ["BackwardClock", "Meter"]

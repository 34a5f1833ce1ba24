"""Backward as a program: captured as a torch.fx graph, cached, run directly or compiled."""

from .cache import program_cache
from .capture import Uncapturable
from .context import capture, compiled_backward
from .forward import compile
from .program import Program

__all__ = ["Program", "Uncapturable", "capture", "compile", "compiled_backward", "program_cache"]

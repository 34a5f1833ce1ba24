"""stowgrad: reverse-mode autograd over PyTorch's kernels, with first-class saved tensors."""

from __future__ import annotations

from . import torch_api  # noqa: F401 (puts a stand-in before PyTorch's engine)
from .autograd import backward, grad
from .context import recording
from .errors import (
    CheckpointMismatch,
    GradientError,
    GraphFreedError,
    HookError,
    HooksDisabledError,
    InPlaceError,
    NotDifferentiableError,
    OutsideRecordError,
    SavedTensorChanged,
    StowError,
    StowgradError,
)
from .memory import Keep, Place, Policy, Recompute, ToDisk, ToHost, stow
from .memory.checkpoint import checkpoint
from .program import (
    Program,
    Uncapturable,
    capture,
    compile,
    compiled_backward,
    program_cache,
)
from .record import record
from .saved import (
    SavedInfo,
    SavedTensor,
    compose,
    disable_saved_tensors_hooks,
    pop_hooks,
    push_hooks,
    saved_tensors_hooks,
    traceable,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointMismatch",
    "GradientError",
    "GraphFreedError",
    "HookError",
    "HooksDisabledError",
    "InPlaceError",
    "Keep",
    "NotDifferentiableError",
    "OutsideRecordError",
    "Place",
    "Policy",
    "Program",
    "Recompute",
    "SavedInfo",
    "SavedTensor",
    "SavedTensorChanged",
    "StowError",
    "StowgradError",
    "ToDisk",
    "ToHost",
    "Uncapturable",
    "backward",
    "capture",
    "checkpoint",
    "compile",
    "compiled_backward",
    "compose",
    "disable_saved_tensors_hooks",
    "grad",
    "pop_hooks",
    "program_cache",
    "push_hooks",
    "record",
    "recording",
    "saved_tensors_hooks",
    "stow",
    "traceable",
]

"""The errors a person can meet. Each says what happened, to what, where, and what to do.

All derive from RuntimeError, as PyTorch's own autograd errors do, so code that catches those
catches these.
"""

from __future__ import annotations


class StowgradError(RuntimeError):
    """Base of every error stowgrad raises on its own account."""


class GraphFreedError(StowgradError):
    """A saved tensor was needed after its node had released it."""


class SavedTensorChanged(StowgradError):
    """A saved tensor was changed in place between its forward and its backward."""


class HookError(StowgradError):
    """A pack or unpack hook broke its contract."""


class HooksDisabledError(StowgradError):
    """Saved-tensor hooks were entered where they are disabled, or the reverse."""


class InPlaceError(StowgradError):
    """An in-place change that has no well-defined gradient."""


class NotDifferentiableError(StowgradError):
    """A gradient was asked for where no derivative exists."""


class OutsideRecordError(StowgradError):
    """A tracked tensor was used where nothing records it."""


class CheckpointMismatch(StowgradError):
    """The recomputation of a checkpointed region saved other tensors than its forward did."""


class GradientError(StowgradError):
    """A gradient has the wrong shape, dtype or device for the tensor it belongs to."""


class CompileError(StowgradError):
    """A backward cannot be compiled, for want of what the backend needs."""


class StowError(StowgradError):
    """A stowed tensor could not be written or brought back."""


def describe(tensor: object) -> str:
    """`float32 [2, 3]`: the dtype and shape of a tensor, as errors print them."""
    dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    return f"{dtype} {list(getattr(tensor, 'shape', ()))}"

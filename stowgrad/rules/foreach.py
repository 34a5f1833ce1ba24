"""Ops on lists of tensors (torch._foreach_*), taken apart into their single forms."""

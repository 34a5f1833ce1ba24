"""Every module of PyTorch's own database: results, buffers and gradients equal PyTorch's."""

from __future__ import annotations

import pytest

from tests.module_cases import check_module, modes, module_db, name

_CASES = [(info, training) for info in module_db for training in modes(info)]


@pytest.mark.parametrize(
    ("info", "training"), _CASES, ids=[f"{name(i)}-{'train' if t else 'eval'}" for i, t in _CASES]
)
def test_gradients_of_modules_are_pytorchs(info, training):
    outcome = check_module(info, training)
    assert outcome.verdict in ("rule", "fallback"), outcome.detail

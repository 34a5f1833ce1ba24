"""Anomaly detection: errors and NaNs in backward name the line of forward code they come from."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import stowgrad as sg
from tests.parity import same

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float32, requires_grad=True)


def line() -> int:
    return inspect.currentframe().f_back.f_lineno  # type: ignore[union-attr]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise ValueError("it fails")


def test_a_nan_is_an_error_that_names_the_op_and_the_forward_line() -> None:
    x = leaf(0.0, 1.0)
    with sg.record(), torch.autograd.detect_anomaly():
        y, at = x.sqrt(), line()
        with (
            pytest.raises(RuntimeError, match=f"Sqrt.* returned nan values.*{__file__}:{at}"),
            pytest.warns(UserWarning, match=f"(?s)Error detected in Sqrt.*line {at}"),
        ):
            (y * 0).sum().backward()
    assert x.grad is None


def test_the_forward_trace_shows_the_users_stack() -> None:
    def model(x: Tensor) -> Tensor:
        return x.sqrt()

    x = leaf(0.0, 1.0)
    with sg.record(), torch.autograd.detect_anomaly():
        y = model(x)
        with pytest.raises(RuntimeError), pytest.warns(UserWarning) as warned:
            (y * 0).sum().backward()
    text = str(warned[0].message)
    assert "in model" in text
    assert "return x.sqrt()" in text
    assert "Traceback of forward call that caused the error" in text


def test_an_error_in_a_backward_names_the_forward_line_too() -> None:
    with sg.record(), torch.autograd.detect_anomaly():
        y, at = Fails.apply(leaf()), line()
        with (
            pytest.raises(ValueError, match="it fails"),
            pytest.warns(UserWarning, match=f"(?s)Error detected in FailsBackward.*line {at}"),
        ):
            y.sum().backward()


def test_without_anomaly_mode_a_nan_is_a_value() -> None:
    def program() -> Any:
        x = leaf(0.0, 1.0)
        (x.sqrt() * 0).sum().backward()
        return x.grad

    assert same(program)[0].isnan()


def test_check_nan_can_be_left_out() -> None:
    def program() -> Any:
        x = leaf(0.0, 1.0)
        with torch.autograd.detect_anomaly(check_nan=False):
            (x.sqrt() * 0).sum().backward()
        return x.grad

    assert same(program)[0].isnan()


def test_set_detect_anomaly_is_a_context_and_a_switch() -> None:
    def program() -> Any:
        log = []
        with torch.autograd.set_detect_anomaly(True):
            log.append(torch.is_anomaly_enabled())
        log.append(torch.is_anomaly_enabled())
        torch.autograd.set_detect_anomaly(True)
        try:
            x = leaf(0.0, 1.0)
            with pytest.raises(RuntimeError, match="nan values"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (x.sqrt() * 0).sum().backward()
        finally:
            torch.autograd.set_detect_anomaly(False)
        return log

    assert same(program) == [True, False]


def test_a_graph_recorded_without_it_says_so() -> None:
    x = leaf(0.0, 1.0)
    with sg.record():
        loss, at = (x.sqrt() * 0).sum(), line()
        with (
            torch.autograd.detect_anomaly(),
            pytest.raises(RuntimeError, match=f"nan values.*{__file__}:{at}"),
            pytest.warns(UserWarning, match="no forward trace"),
        ):
            loss.backward()


def test_hooks_run_as_without_it() -> None:
    def program() -> Any:
        log: list[str] = []
        x = leaf()
        with torch.autograd.detect_anomaly():
            y = x * 2
            y.grad_fn.register_prehook(lambda go: log.append("before"))
            y.grad_fn.register_hook(lambda gi, go: (log.append("after"), (gi[0] * 3, None))[1])
            y.register_hook(lambda g: log.append("y"))
            y.sum().backward()
        return log, x.grad

    assert same(program)[1].tolist() == [6.0, 6.0]


def test_nan_in_a_complex_gradient() -> None:
    def program() -> Any:
        x = torch.tensor([0j, 1j], requires_grad=True)
        with torch.autograd.detect_anomaly(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = x.sqrt()
            with pytest.raises(RuntimeError, match="nan values"):
                (y * 0).abs().sum().backward()

    same(program)


def test_nan_in_a_sparse_gradient() -> None:
    def program() -> Any:
        w = torch.ones(3, 2, requires_grad=True)
        with torch.autograd.detect_anomaly(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = torch.nn.functional.embedding(torch.tensor([1]), w, sparse=True)
            with pytest.raises(RuntimeError, match="nan values"):
                y.backward(torch.full((1, 2), float("nan")))

    same(program)


def test_gradients_are_the_same_with_it() -> None:
    def program() -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        with torch.autograd.detect_anomaly():
            net(torch.ones(2, 3)).sum().backward()
        return [p.grad for p in net.parameters()]

    same(program)

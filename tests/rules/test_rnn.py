"""Recurrent layers and packed sequences: PyTorch's values bit by bit, gradients once and twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import stowgrad as sg
from stowgrad.context import current_recorder

_LAYERS = {
    "lstm": nn.LSTM,
    "projected lstm": lambda *a, **k: nn.LSTM(*a, proj_size=3, **k),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
_SHAPES = {
    "stacked, both ways": {"num_layers": 2, "bidirectional": True, "dropout": 0.3},
    "batch first": {"batch_first": True},
    "no bias": {"batch_first": True, "bias": False, "bidirectional": True},
}


def make(kind, dtype, **options):
    torch.manual_seed(0)
    layer = _LAYERS[kind](5, 4, **options).to(dtype)
    return layer, torch.randn(3, 6, 5, dtype=dtype, requires_grad=True)


def outputs(layer, x):
    """Results of the layer, with its states given and all of its results used."""
    ways = 2 if layer.bidirectional else 1
    rows = layer.num_layers * ways
    batch = x.size(0 if layer.batch_first else 1)
    size = getattr(layer, "proj_size", 0) or layer.hidden_size
    states = torch.linspace(-1, 1, rows * batch * size, dtype=x.dtype).reshape(rows, batch, size)
    states.requires_grad_()
    if isinstance(layer, nn.LSTM):
        cells = torch.linspace(-1, 1, rows * batch * layer.hidden_size, dtype=x.dtype)
        cells = cells.reshape(rows, batch, layer.hidden_size).requires_grad_()
        out, (h, c) = layer(x, (states, cells))
        return [out, h, c], [states, cells]
    out, h = layer(x, states)
    return [out, h], [states]


def run(layer, x, second=False):
    torch.manual_seed(1)
    results, states = outputs(layer, x)
    leaves = [x, *states, *layer.parameters()]
    cotangents = [torch.randn(r.shape, dtype=r.dtype) for r in results]
    first = torch.autograd.grad(results, leaves, cotangents, create_graph=second)
    if second:
        again = [torch.randn(g.shape, dtype=g.dtype) for g in first]
        first = [*first, *torch.autograd.grad(first, leaves, again)]
    return [r.detach() for r in results], [g.detach() for g in first]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("kind", _LAYERS)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_layers(kind, shape, dtype, training):
    layer, x = make(kind, dtype, **_SHAPES[shape])
    layer.train(training)
    values, gradients = run(layer, x)
    with sg.record():
        actual_values, actual = run(layer, x)
    assert_close(actual_values, values, rtol=0, atol=0)
    tight = {"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {}
    assert_close(actual, gradients, **tight)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(k, torch.float64) for k in _LAYERS] + [("lstm", torch.float32)]
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_layers_differentiate_twice(kind, dtype):
    layer, x = make(kind, dtype, num_layers=2, bidirectional=True)
    expected = run(layer, x, second=True)
    with sg.record():
        actual = run(layer, x, second=True)
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh", "relu"])
def test_packed_sequences(kind, dtype):
    layer, x = make(kind, dtype, batch_first=True, bidirectional=True)

    def packed():
        rows = pack_padded_sequence(x, torch.tensor([6, 4, 1]), batch_first=True)
        out, _ = pad_packed_sequence(layer(rows)[0], batch_first=True)
        return out.detach(), torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])

    expected = packed()
    with sg.record():
        actual = packed()
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell, bias, dtype):
    torch.manual_seed(0)
    step = cell(5, 4, bias=bias).to(dtype)
    x = torch.randn(3, 5, dtype=dtype, requires_grad=True)

    def two_steps():
        out = step(x, step(x))
        out = torch.cat(out) if isinstance(out, tuple) else out
        leaves = [x, *step.parameters()]
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        return out.detach(), [g.detach() for g in first], second

    value, *expected = two_steps()
    with sg.record():
        actual_value, *actual = two_steps()
    assert_close(actual_value, value, rtol=0, atol=0)
    assert_close(actual, expected)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_cell_is_one_op(name):
    step, x = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}[name](5, 4), torch.randn(3, 5)
    with sg.record():
        ops = current_recorder().ops = {}
        step(x)
    assert {str(o) for o in ops} == {f"stowgrad.{name}_cell.default", f"aten.{name}_cell.default"}


@pytest.mark.parametrize(
    ("kind", "which"),
    [(kind, which) for kind in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell) for which in (0, 1)]
    + [(nn.LSTM, 2), (nn.GRUCell, 0)],
)
def test_results_may_be_changed_in_place(kind, which):
    """What backward needs of them the layer keeps for itself, as it does under PyTorch."""
    torch.manual_seed(0)
    step = kind(5, 4).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    x = x if isinstance(step, nn.RNNCellBase) else x.expand(6, 3, 5)

    def change():
        out = tree_leaves(step(x))
        out[which].mul_(2)
        return torch.autograd.grad(sum(o.sum() for o in out), list(step.parameters()))

    expected = change()
    with sg.record():
        assert_close(change(), expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "op"),
    [
        ("lstm", torch.float64, "stowgrad.lstm_layer.default"),
        ("lstm", torch.float32, "aten.mkldnn_rnn_layer.default"),
        ("gru", torch.float32, "stowgrad.gru_layer.default"),
        ("tanh", torch.float64, "stowgrad.rnn_layer.default"),
    ],
)
def test_a_layer_is_one_op_however_long_the_sequence(kind, dtype, op):
    layer, x = make(kind, dtype)
    with sg.record():
        ops = current_recorder().ops = {}
        layer(x)
    assert {str(o): n for o, n in ops.items()}[op] == 1
    assert sum(ops.values()) < 8


def test_the_states_alone_may_be_used():
    """No gradient of the outputs arrives, or none of the states."""
    for chosen in (0, 1, 2):
        layer, x = make("lstm", torch.float64)
        results, _ = outputs(layer, x)
        expected = torch.autograd.grad(results[chosen].sum(), x)
        with sg.record():
            results, _ = outputs(layer, x)
            assert_close(torch.autograd.grad(results[chosen].sum(), x), expected)

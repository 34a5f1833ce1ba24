"""Recurrent layers and packed sequences.

PyTorch makes a recurrent layer of a dozen small ops a step. Here one layer in one direction is one
op, with the same kernels in the same order, so that results are the same bit by bit; its rule is
backpropagation through time, with the gradients of weights taken for all steps at once. Saves the
gates of each step and nothing else: less than half of what its parts would.

Taken so: dense LSTM, GRU and RNN layers on a CPU. Others (packed sequences, projections, other
devices) are recorded as their parts. The float32 LSTM is one kernel, `mkldnn_rnn_layer`.
"""

from __future__ import annotations

import torch

from .. import _private
from ..ops import SPECIAL
from .common import linear
from .table import vjp

aten = torch.ops.aten

vjp(aten._pack_padded_sequence, "input.shape batch_sizes", outputs="data batch_sizes",
    differentiable="data", constant="lengths",
    input=lambda g, s: aten._pack_padded_sequence_backward(
        g, s.input_shape, s.batch_sizes, s.batch_first))


# -- the layers, x [time, batch, input] to out [time, batch, hidden], and what backward wants.
# Each step makes fresh tensors: how a matrix product rounds may depend on where its memory begins.


def lstm_layer(x, h, c, w_ih, w_hh, b_ih, b_hh, reverse):
    """Also the gates (input, forget, new, output) and the cells of every step."""
    inputs = linear(x, w_ih, b_ih).unbind(0)
    out, gates, cells = ([h] * len(inputs) for _ in range(3))
    for t in _steps(inputs, reverse):
        gates[t] = linear(h, w_hh, b_hh).add_(inputs[t])
        i, f, new, o = gates[t].chunk(4, 1)
        i.sigmoid_(), f.sigmoid_(), new.tanh_(), o.sigmoid_()
        cells[t] = c = (f * c).add_(i * new)
        out[t] = h = o * c.tanh()
    return torch.stack(out), h, c, torch.stack(gates), torch.stack(cells)


def gru_layer(x, h, w_ih, w_hh, b_ih, b_hh, reverse):
    """Also the gates (reset, update, hidden part of the new value) and the new values."""
    inputs = linear(x, w_ih, b_ih).unbind(0)
    out, gates, news = ([h] * len(inputs) for _ in range(3))
    for t in _steps(inputs, reverse):
        gates[t] = linear(h, w_hh, b_hh)
        reset, update, hidden = gates[t].chunk(3, 1)
        to_reset, to_update, to_new = inputs[t].chunk(3, 1)
        reset.add_(to_reset).sigmoid_(), update.add_(to_update).sigmoid_()
        news[t] = new = to_new.add(hidden * reset).tanh_()
        out[t] = h = (h - new).mul_(update).add_(new)
    return torch.stack(out), h, torch.stack(gates), torch.stack(news)


def rnn_layer(x, h, w_ih, w_hh, b_ih, b_hh, relu, reverse):
    inputs = linear(x, w_ih, b_ih).unbind(0)
    out = [h] * len(inputs)
    for t in _steps(inputs, reverse):
        h = linear(h, w_hh, b_hh).add_(inputs[t])
        out[t] = h = h.relu() if relu else h.tanh()
    return torch.stack(out), h


def _steps(inputs, reverse):
    return range(len(inputs) - 1, -1, -1) if reverse else range(len(inputs))


_library = torch.library.Library("stowgrad", "FRAGMENT")
_WEIGHTS = "Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh"
for _layer, _schema in (
    (lstm_layer, f"(Tensor x, Tensor h, Tensor c, {_WEIGHTS}, bool reverse) -> (" + "Tensor, " * 4),
    (gru_layer, f"(Tensor x, Tensor h, {_WEIGHTS}, bool reverse) -> (Tensor, Tensor, Tensor, "),
    (rnn_layer, f"(Tensor x, Tensor h, {_WEIGHTS}, bool relu, bool reverse) -> (Tensor, "),
):
    _library.define(_layer.__name__ + _schema + "Tensor)")
    _library.impl(_layer.__name__, _layer, "CompositeExplicitAutograd")


# -- backward


@vjp(torch.ops.stowgrad.lstm_layer, "x h c w_ih w_hh b_ih b_hh out gates cells",
     wrt="x h c w_ih w_hh b_ih b_hh", outputs="out hy cy gates cells", differentiable="out hy cy")
def lstm_layer_rule(g, s, needs):
    kept = (None, None) if torch.is_grad_enabled() else (s.gates, s.cells)
    return lstm_backward(
        *g[:3], s.out, s.x, s.h, s.c, s.w_ih, s.w_hh, s.b_ih, s.b_hh, s.reverse, *kept)


@vjp(aten.mkldnn_rnn_layer, "input weight0 weight1 weight2 weight3 hx_ cx_ output hy cy workspace",
     wrt="input weight0 weight1 weight2 weight3 hx_ cx_", outputs="output hy cy workspace",
     differentiable="output hy cy")
def mkldnn_rnn_layer(g, s, needs):
    """The kernel for first order; where that is to be differentiated again, the formula."""
    to_output, to_h, to_c, _ = g
    if torch.is_grad_enabled():
        biases = (s.weight2, s.weight3) if s.has_biases else (None, None)
        x, h, c, *weights = lstm_backward(
            to_output, to_h, to_c, s.output, s.input, s.hx_, s.cx_, s.weight0, s.weight1, *biases,
            s.reverse, None, None)
        return x, *weights, h, c
    return aten.mkldnn_rnn_layer_backward(
        s.input, s.weight0, s.weight1, s.weight2, s.weight3, s.hx_, s.cx_, s.output, s.hy, s.cy,
        to_output, to_h, to_c, s.reverse, s.mode, s.hidden_size, s.num_layers, s.has_biases,
        s.train, s.bidirectional, s.batch_sizes, s.batch_first, s.workspace)


def lstm_backward(
    to_out, to_h, to_c, out, x, h0, c0, w_ih, w_hh, b_ih, b_hh, reverse, gates, cells
):
    """Gradients of (x, h0, c0, w_ih, w_hh, b_ih, b_hh).

    `gates` and `cells` None: work them out from `out`, so that all of it can be differentiated.
    Source: Hochreiter and Schmidhuber 1997; forget gates: Gers, Schmidhuber, Cummins 2000.
    """
    steps = _steps(x, reverse)
    before = _shifted(out, h0, reverse)
    if gates is not None:
        gates, cells = gates.unbind(0), cells.unbind(0)
    else:
        raw = (linear(x, w_ih, b_ih) + linear(before, w_hh, b_hh)).chunk(4, -1)
        i, f, new, o = raw[0].sigmoid(), raw[1].sigmoid(), raw[2].tanh(), raw[3].sigmoid()
        gates, cells, cell = torch.cat([i, f, new, o], -1).unbind(0), [c0] * len(x), c0
        for t in steps:
            cells[t] = cell = f[t] * cell + i[t] * new[t]
    earlier = [*cells[1:], c0] if reverse else [c0, *cells[:-1]]
    given = None if to_out is None else to_out.unbind(0)
    h = torch.zeros_like(h0) if to_h is None else to_h
    c = torch.zeros_like(c0) if to_c is None else to_c
    found = [h] * len(x)
    for t in reversed(steps):
        if given is not None:
            h = h + given[t]
        i, f, new, o = gates[t].chunk(4, 1)
        squashed = cells[t].tanh()
        c = c + aten.tanh_backward(h * o, squashed)
        found[t] = gate = torch.cat([
            aten.sigmoid_backward(c * new, i),
            aten.sigmoid_backward(c * earlier[t], f),
            aten.tanh_backward(c * i, new),
            aten.sigmoid_backward(h * squashed, o),
        ], 1)  # fmt: skip
        c = c * f
        h = gate @ w_hh
    g = torch.stack(found)
    return _to_x_and_weights(g, g, h, (c,), x, before, w_ih, b_ih)


@vjp(torch.ops.stowgrad.gru_layer, "x h w_ih w_hh b_ih b_hh out gates news",
     wrt="x h w_ih w_hh b_ih b_hh", outputs="out hy gates news", differentiable="out hy")
def gru_layer_rule(g, s, needs):
    """Source: Cho et al. 2014 (arXiv 1406.1078), with the reset gate after the product."""
    to_out, to_h, *_ = g
    before = _shifted(s.out, s.h, s.reverse)
    if torch.is_grad_enabled():
        to_reset, to_update, to_new = linear(s.x, s.w_ih, s.b_ih).chunk(3, -1)
        reset, update, hidden = linear(before, s.w_hh, s.b_hh).chunk(3, -1)
        reset, update = (to_reset + reset).sigmoid(), (to_update + update).sigmoid()
        gates = torch.cat([reset, update, hidden], -1).unbind(0)
        news = (to_new + hidden * reset).tanh().unbind(0)
    else:
        gates, news = s.gates.unbind(0), s.news.unbind(0)
    earlier = before.unbind(0)
    given = None if to_out is None else to_out.unbind(0)
    h = torch.zeros_like(s.h) if to_h is None else to_h
    to_inputs, to_hiddens = [h] * len(s.x), [h] * len(s.x)
    for t in reversed(_steps(s.x, s.reverse)):
        if given is not None:
            h = h + given[t]
        reset, update, hidden = gates[t].chunk(3, 1)
        kept = h * update
        to_new = aten.tanh_backward(h - kept, news[t])
        to_reset = aten.sigmoid_backward(to_new * hidden, reset)
        to_update = aten.sigmoid_backward(h * (earlier[t] - news[t]), update)
        to_inputs[t] = torch.cat([to_reset, to_update, to_new], 1)
        to_hiddens[t] = to_gates = torch.cat([to_reset, to_update, to_new * reset], 1)
        h = torch.addmm(kept, to_gates, s.w_hh)
    return _to_x_and_weights(
        torch.stack(to_inputs), torch.stack(to_hiddens), h, (), s.x, before, s.w_ih, s.b_ih)


@vjp(torch.ops.stowgrad.rnn_layer, "x h w_ih w_hh b_ih out", wrt="x h w_ih w_hh b_ih b_hh",
     outputs="out hy")
def rnn_layer_rule(g, s, needs):
    """Source: Elman 1990."""
    to_out, to_h = g
    out = s.out.unbind(0)
    given = None if to_out is None else to_out.unbind(0)
    h = torch.zeros_like(s.h) if to_h is None else to_h
    found = [h] * len(out)
    for t in reversed(_steps(out, s.reverse)):
        if given is not None:
            h = h + given[t]
        found[t] = (
            aten.threshold_backward(h, out[t], 0) if s.relu else aten.tanh_backward(h, out[t])
        )
        h = found[t] @ s.w_hh
    to_sum = torch.stack(found)
    return _to_x_and_weights(
        to_sum, to_sum, h, (), s.x, _shifted(s.out, s.h, s.reverse), s.w_ih, s.b_ih)


def _shifted(states, first, reverse):
    """The state before each step."""
    first = first.unsqueeze(0)
    return torch.cat([states[1:], first] if reverse else [first, states[:-1]])


def _to_x_and_weights(to_input, to_hidden, h, cell, x, before, w_ih, bias):
    """From the gradients of the two products, x w_ih' + b_ih and `before` w_hh' + b_hh."""
    rows, hidden = to_input.flatten(0, 1), to_hidden.flatten(0, 1)
    biases = (None, None)
    if bias is not None:
        to_bias = rows.sum(0)
        biases = (to_bias, to_bias if to_hidden is to_input else hidden.sum(0))
    return (
        to_input @ w_ih, h, *cell, rows.mT @ x.flatten(0, 1), hidden.mT @ before.flatten(0, 1),
        *biases,
    )  # fmt: skip


# -- which layers are taken so


def _suits(x, weights, layers, kind):
    if not (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and all(w.dtype == x.dtype for w in weights)
        and x.numel() > 0
        and len(weights) == layers * (len(weights) // layers)
        and not torch.is_autocast_enabled("cpu")
        and not _private.functorch_active()
    ):
        return False
    fused = x.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return kind is not torch.ops.stowgrad.lstm_layer or not fused


def _record(kind, options, recorder, entry, func, args, kwargs):
    x, states, weights, biases, layers, dropout, train, both, batch_first = args
    ways = 2 if both else 1
    each = 4 if biases else 2
    if len(weights) != each * ways * layers or not _suits(x, weights, layers, kind):
        return recorder.decompose(func, args, kwargs)
    with recorder.on():
        states = states if isinstance(states, (list, tuple)) else [states]
        starts = list(zip(*(t.unbind(0) for t in states), strict=True))
        out = x.transpose(0, 1) if batch_first else x
        ends = []
        for layer in range(layers):
            outs = []
            for way in range(ways):
                at = layer * ways + way
                mine = weights[at * each : (at + 1) * each]
                mine = mine if biases else [*mine, None, None]
                found = kind(out, *starts[at], *mine, *options, way == 1)
                outs.append(found[0])
                ends.append(found[1 : 1 + len(states)])
            out = torch.cat(outs, -1) if both else outs[0]
            if dropout and train and layer < layers - 1:
                out = torch.dropout(out, dropout, True)
        finals = [torch.stack(end) for end in zip(*ends, strict=True)]
        return (out.transpose(0, 1) if batch_first else out, *finals)


def _taken_as(kind, *options):
    return lambda *call: _record(kind, options, *call)


SPECIAL[aten.lstm.input] = _taken_as(torch.ops.stowgrad.lstm_layer)
SPECIAL[aten.gru.input] = _taken_as(torch.ops.stowgrad.gru_layer)
SPECIAL[aten.rnn_tanh.input] = _taken_as(torch.ops.stowgrad.rnn_layer, False)
SPECIAL[aten.rnn_relu.input] = _taken_as(torch.ops.stowgrad.rnn_layer, True)

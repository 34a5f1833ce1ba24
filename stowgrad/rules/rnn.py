"""Recurrent layers and packed sequences.

PyTorch makes a recurrent layer of a dozen small ops a step. Here one layer in one direction is one
op, with the same kernels in the same order, so that results are the same bit by bit; its rule is
backpropagation through time, with the gradients of weights taken for all steps at once. Saves the
gates of each step and nothing else: less than half of what its parts would. An LSTM or GRU cell is
a layer of one step.

Taken so: dense LSTM, GRU and RNN layers, LSTM and GRU cells, on a CPU. Others (packed sequences,
projections, other devices) are recorded as their parts. The float32 LSTM layer is one kernel,
`mkldnn_rnn_layer`.
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
        h, c, gates[t], _ = _lstm_step(inputs[t], h, c, w_hh, b_hh)
        out[t], cells[t] = h, c
    return torch.stack(out), h, c, torch.stack(gates), torch.stack(cells)


def lstm_cell(x, h, c, w_ih, w_hh, b_ih, b_hh):
    """Also the gates and tanh(c)."""
    return _lstm_step(linear(x, w_ih, b_ih), h, c, w_hh, b_hh)


def _lstm_step(given, h, c, w_hh, b_hh):
    gates = linear(h, w_hh, b_hh).add_(given)
    i, f, new, o = gates.chunk(4, 1)
    i.sigmoid_(), f.sigmoid_(), new.tanh_(), o.sigmoid_()
    c = (f * c).add_(i * new)
    squashed = c.tanh()
    return o * squashed, c, gates, squashed


def gru_layer(x, h, w_ih, w_hh, b_ih, b_hh, reverse):
    """Also the gates (reset, update, hidden part of the new value) and the new values."""
    inputs = linear(x, w_ih, b_ih).unbind(0)
    out, gates, news = ([h] * len(inputs) for _ in range(3))
    for t in _steps(inputs, reverse):
        out[t], gates[t], news[t] = _gru_step(inputs[t], h, w_hh, b_hh)
        h = out[t]
    return torch.stack(out), h, torch.stack(gates), torch.stack(news)


def gru_cell(x, h, w_ih, w_hh, b_ih, b_hh):
    """Also the gates and the new values."""
    return _gru_step(linear(x, w_ih, b_ih), h, w_hh, b_hh)


def _gru_step(given, h, w_hh, b_hh):
    gates = linear(h, w_hh, b_hh)
    reset, update, hidden = gates.chunk(3, 1)
    to_reset, to_update, to_new = given.chunk(3, 1)
    reset.add_(to_reset).sigmoid_(), update.add_(to_update).sigmoid_()
    new = to_new.add(hidden * reset).tanh_()
    return (h - new).mul_(update).add_(new), gates, new


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
    (lstm_cell, f"(Tensor x, Tensor h, Tensor c, {_WEIGHTS}) -> (" + "Tensor, " * 3),
    (gru_cell, f"(Tensor x, Tensor h, {_WEIGHTS}) -> (Tensor, Tensor, "),
):
    _library.define(_layer.__name__ + _schema + "Tensor)")
    _library.impl(_layer.__name__, _layer, "CompositeExplicitAutograd")


# -- backward


@vjp(torch.ops.stowgrad.lstm_layer, "x h c w_ih w_hh b_ih b_hh out gates cells",
     wrt="x h c w_ih w_hh b_ih b_hh", outputs="out hy cy gates cells", differentiable="out hy cy")
def lstm_layer_rule(g, s, needs):
    kept = (None,) if torch.is_grad_enabled() else (s.gates, s.cells)
    return lstm_backward(
        *g[:3], s.out, s.x, s.h, s.c, s.w_ih, s.w_hh, s.b_ih, s.b_hh, s.reverse, *kept)


@vjp(torch.ops.stowgrad.lstm_cell, "x h c w_ih w_hh b_ih b_hh gates squashed",
     wrt="x h c w_ih w_hh b_ih b_hh", outputs="hy cy gates squashed", differentiable="hy cy")
def lstm_cell_rule(g, s, needs):
    x, h = s.x.unsqueeze(0), s.h.unsqueeze(0)
    kept = (None,) if torch.is_grad_enabled() else (s.gates.unsqueeze(0), None, [s.squashed])
    to_x, *others = lstm_backward(
        None, *g[:2], h, x, s.h, s.c, s.w_ih, s.w_hh, s.b_ih, s.b_hh, False, *kept)
    return to_x.squeeze(0), *others


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
            s.reverse)
        return x, *weights, h, c
    return aten.mkldnn_rnn_layer_backward(
        s.input, s.weight0, s.weight1, s.weight2, s.weight3, s.hx_, s.cx_, s.output, s.hy, s.cy,
        to_output, to_h, to_c, s.reverse, s.mode, s.hidden_size, s.num_layers, s.has_biases,
        s.train, s.bidirectional, s.batch_sizes, s.batch_first, s.workspace)


def lstm_backward(
    to_out, to_h, to_c, out, x, h0, c0, w_ih, w_hh, b_ih, b_hh, reverse,
    gates=None, cells=None, squashed=None,
):  # fmt: skip
    """Gradients of (x, h0, c0, w_ih, w_hh, b_ih, b_hh).

    `gates` None: work them out from `out`, so that all of it can be differentiated. `squashed` is
    the tanh of `cells`; for a single step it is enough.
    Source: Hochreiter and Schmidhuber 1997; forget gates: Gers, Schmidhuber, Cummins 2000.
    """
    steps = _steps(x, reverse)
    before = _shifted(out, h0, reverse)
    if gates is not None:
        gates, cells = gates.unbind(0), [c0] if cells is None else cells.unbind(0)
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
        output = cells[t].tanh() if squashed is None else squashed[t]
        c = c + aten.tanh_backward(h * o, output)
        found[t] = gate = torch.cat([
            aten.sigmoid_backward(c * new, i),
            aten.sigmoid_backward(c * earlier[t], f),
            aten.tanh_backward(c * i, new),
            aten.sigmoid_backward(h * output, o),
        ], 1)  # fmt: skip
        c = c * f
        h = gate @ w_hh
    g = torch.stack(found)
    return _to_x_and_weights(g, g, h, (c,), x, before, w_ih, b_ih)


@vjp(torch.ops.stowgrad.gru_layer, "x h w_ih w_hh b_ih b_hh out gates news",
     wrt="x h w_ih w_hh b_ih b_hh", outputs="out hy gates news", differentiable="out hy")
def gru_layer_rule(g, s, needs):
    kept = (None, None) if torch.is_grad_enabled() else (s.gates, s.news)
    return gru_backward(*g[:2], s.out, s.x, s.h, s.w_ih, s.w_hh, s.b_ih, s.b_hh, s.reverse, *kept)


@vjp(torch.ops.stowgrad.gru_cell, "x h w_ih w_hh b_ih b_hh gates new",
     wrt="x h w_ih w_hh b_ih b_hh", outputs="hy gates new", differentiable="hy")
def gru_cell_rule(g, s, needs):
    x, h = s.x.unsqueeze(0), s.h.unsqueeze(0)
    kept = (None, None) if torch.is_grad_enabled() else (s.gates.unsqueeze(0), s.new.unsqueeze(0))
    to_x, *others = gru_backward(
        None, g, h, x, s.h, s.w_ih, s.w_hh, s.b_ih, s.b_hh, False, *kept)
    return to_x.squeeze(0), *others


def gru_backward(to_out, to_h, out, x, h0, w_ih, w_hh, b_ih, b_hh, reverse, gates, news):
    """Gradients of (x, h0, w_ih, w_hh, b_ih, b_hh); `gates` and `news` as in `lstm_backward`.

    Source: Cho et al. 2014 (arXiv 1406.1078), with the reset gate after the product.
    """
    before = _shifted(out, h0, reverse)
    if gates is not None:
        gates, news = gates.unbind(0), news.unbind(0)
    else:
        to_reset, to_update, to_new = linear(x, w_ih, b_ih).chunk(3, -1)
        reset, update, hidden = linear(before, w_hh, b_hh).chunk(3, -1)
        reset, update = (to_reset + reset).sigmoid(), (to_update + update).sigmoid()
        gates = torch.cat([reset, update, hidden], -1).unbind(0)
        news = (to_new + hidden * reset).tanh().unbind(0)
    earlier = before.unbind(0)
    given = None if to_out is None else to_out.unbind(0)
    h = torch.zeros_like(h0) if to_h is None else to_h
    to_inputs, to_hiddens = [h] * len(x), [h] * len(x)
    for t in reversed(_steps(x, reverse)):
        if given is not None:
            h = h + given[t]
        reset, update, hidden = gates[t].chunk(3, 1)
        kept = h * update
        to_new = aten.tanh_backward(h - kept, news[t])
        to_reset = aten.sigmoid_backward(to_new * hidden, reset)
        to_update = aten.sigmoid_backward(h * (earlier[t] - news[t]), update)
        to_inputs[t] = torch.cat([to_reset, to_update, to_new], 1)
        to_hiddens[t] = to_gates = torch.cat([to_reset, to_update, to_new * reset], 1)
        h = torch.addmm(kept, to_gates, w_hh)
    return _to_x_and_weights(
        torch.stack(to_inputs), torch.stack(to_hiddens), h, (), x, before, w_ih, b_ih)


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
        if not both:
            out = out.clone()  # people may change it; the layer saved its own
        finals = [torch.stack(end) for end in zip(*ends, strict=True)]
        return (out.transpose(0, 1) if batch_first else out, *finals)


def _taken_as(kind, *options):
    return lambda *call: _record(kind, options, *call)


def _cell_taken_as(kind, gates):
    def record(recorder, entry, func, args, kwargs):
        x, states, w_ih, w_hh, *biases = args
        states = states if isinstance(states, (list, tuple)) else [states]
        b_ih, b_hh = biases = (*biases, None, None)[:2]
        size = w_hh.size(-1)
        given = [w_ih, w_hh, *states, *(b for b in biases if b is not None)]
        fits = (
            not kwargs
            and (b_ih is None) == (b_hh is None)
            and x.dim() == 2
            and w_ih.shape == (gates * size, x.size(1))
            and w_hh.size(0) == gates * size
            and all(state.shape == (x.size(0), size) for state in states)
        )
        if not fits or not _suits(x, given, 1, kind):
            return recorder.decompose(func, args, kwargs)
        with recorder.on():
            found = kind(x, *states, w_ih, w_hh, b_ih, b_hh)
        return found[:2] if len(states) == 2 else found[0]

    return record


SPECIAL[aten.lstm.input] = _taken_as(torch.ops.stowgrad.lstm_layer)
SPECIAL[aten.gru.input] = _taken_as(torch.ops.stowgrad.gru_layer)
SPECIAL[aten.rnn_tanh.input] = _taken_as(torch.ops.stowgrad.rnn_layer, False)
SPECIAL[aten.rnn_relu.input] = _taken_as(torch.ops.stowgrad.rnn_layer, True)
SPECIAL[aten.lstm_cell.default] = _cell_taken_as(torch.ops.stowgrad.lstm_cell, 4)
SPECIAL[aten.gru_cell.default] = _cell_taken_as(torch.ops.stowgrad.gru_cell, 3)

"""Recurrent layers and packed sequences.

PyTorch makes a recurrent layer of one cell after another, and so it is recorded; only the float32
LSTM on a CPU runs as one fused kernel a layer and direction, `mkldnn_rnn_layer`.
"""

from __future__ import annotations

import torch

from .table import vjp

aten = torch.ops.aten

vjp(aten._pack_padded_sequence, "input.shape batch_sizes", outputs="data batch_sizes",
    differentiable="data", constant="lengths",
    input=lambda g, s: aten._pack_padded_sequence_backward(
        g, s.input_shape, s.batch_sizes, s.batch_first))


@vjp(aten.mkldnn_rnn_layer,
     "input weight0 weight1 weight2 weight3 hx_ cx_ output hy cy workspace",
     wrt="input weight0 weight1 weight2 weight3 hx_ cx_", outputs="output hy cy workspace",
     differentiable="output hy cy")
def mkldnn_rnn_layer(g, s, needs):
    """The kernel for first order; where that is to be differentiated again, the formula."""
    to_output, to_h, to_c, _ = g
    if torch.is_grad_enabled():
        return lstm_layer_backward(
            to_output, to_h, to_c, s.output, s.input, s.weight0, s.weight1,
            s.weight2 + s.weight3 if s.has_biases else 0, s.hx_, s.cx_, s.reverse)
    return aten.mkldnn_rnn_layer_backward(
        s.input, s.weight0, s.weight1, s.weight2, s.weight3, s.hx_, s.cx_, s.output, s.hy, s.cy,
        to_output, to_h, to_c, s.reverse, s.mode, s.hidden_size, s.num_layers, s.has_biases,
        s.train, s.bidirectional, s.batch_sizes, s.batch_first, s.workspace)


def lstm_layer_backward(to_output, to_h, to_c, output, x, w_ih, w_hh, bias, h0, c0, reverse):
    """Gradients of x, w_ih, w_hh, both biases, h0 and c0, of one LSTM layer in one direction.

    x is [time, batch, input], `output` all hidden states [time, batch, hidden]. These give every
    step's gates at once; then the cells are run forward, and the gradients of gates backward.
    Source: Hochreiter and Schmidhuber 1997, with forget gates (Gers et al. 2000).
    """
    if reverse:
        x, output = x.flip(0), output.flip(0)
        to_output = None if to_output is None else to_output.flip(0)
    before = torch.cat([h0.unsqueeze(0), output[:-1]])
    raw_i, raw_f, raw_g, raw_o = (x @ w_ih.mT + before @ w_hh.mT + bias).chunk(4, -1)
    i, f, new, o = raw_i.sigmoid(), raw_f.sigmoid(), raw_g.tanh(), raw_o.sigmoid()
    cells = [c0]
    for t in range(x.size(0)):
        cells.append(f[t] * cells[t] + i[t] * new[t])

    h = torch.zeros_like(h0) if to_h is None else to_h
    c = torch.zeros_like(c0) if to_c is None else to_c
    gates = []
    for t in reversed(range(x.size(0))):
        if to_output is not None:
            h = h + to_output[t]
        squashed = cells[t + 1].tanh()
        c = c + h * o[t] * (1 - squashed * squashed)
        gate = torch.cat([
            c * new[t] * i[t] * (1 - i[t]),
            c * cells[t] * f[t] * (1 - f[t]),
            c * i[t] * (1 - new[t] * new[t]),
            h * squashed * o[t] * (1 - o[t]),
        ], -1)  # fmt: skip
        c = c * f[t]
        h = gate @ w_hh
        gates.append(gate)
    to_gates = torch.stack(gates[::-1])
    to_x = to_gates @ w_ih
    flat = to_gates.flatten(0, 1).mT
    to_bias = to_gates.sum((0, 1))
    return (
        to_x.flip(0) if reverse else to_x,
        flat @ x.flatten(0, 1), flat @ before.flatten(0, 1), to_bias, to_bias, h, c,
    )  # fmt: skip

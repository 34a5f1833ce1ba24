"""Embedding and embedding bags: rows picked by index, their gradients added up by index."""

from __future__ import annotations

import torch

from .table import nondifferentiable, vjp

aten = torch.ops.aten

nondifferentiable(aten.one_hot)

vjp(aten.embedding, "indices weight.shape",
    weight=lambda g, s: aten.embedding_backward(
        g, s.indices, s.weight_shape[0], s.padding_idx, s.scale_grad_by_freq, s.sparse))
# Scaling by frequency is part of the first backward by definition, not of its derivative.
vjp(aten.embedding_dense_backward, "indices",
    grad_output=lambda g, s: _picked(g, s.indices, s.padding_idx))


def _picked(weight, indices, padding_idx):
    rows = torch.embedding(weight, indices)
    if padding_idx < 0:
        return rows
    return rows.masked_fill((indices == padding_idx).unsqueeze(-1), 0)


# -- bags: sums (mode 0), means (1) or maxima (2) of the rows of each bag

_SUM, _MEAN, _MAX = 0, 1, 2


@vjp(aten._embedding_bag,
     "indices offsets offset2bag bag_size maximum_indices per_sample_weights:weight "
     "weight:per_sample_weights weight.shape",
     wrt="weight per_sample_weights", outputs="out offset2bag bag_size maximum_indices",
     differentiable="out")
def embedding_bag(g, s, needs):
    to_weight = to_samples = None
    if needs[0]:
        to_weight = aten._embedding_bag_backward(
            g, s.indices, s.offsets, s.offset2bag, s.bag_size, s.maximum_indices,
            s.weight_shape[0], s.scale_grad_by_freq, s.mode, s.sparse, s.per_sample_weights,
            s.padding_idx)
    if needs[1]:
        to_samples = aten._embedding_bag_per_sample_weights_backward(
            g, s.weight, s.indices, s.offsets, s.offset2bag, s.mode, s.padding_idx)
    return to_weight, to_samples


@vjp(aten._embedding_bag_backward,
     "grad:per_sample_weights indices offsets offset2bag bag_size maximum_indices "
     "per_sample_weights:grad", wrt="grad per_sample_weights")
def embedding_bag_backward(g, s, needs):
    """Linear in `grad` and in the samples' weights: the bags of g, and the samples' products."""
    to_grad = to_samples = None
    if needs[0] and s.mode == _MAX:
        chosen = g.gather(0, s.maximum_indices.clamp(min=0))
        to_grad = torch.where(s.bag_size.unsqueeze(1) > 0, chosen, 0)
    elif needs[0]:
        bags = s.bag_size.size(0)
        to_grad = aten._embedding_bag(
            g, s.indices, s.offsets, False, s.mode, False, s.per_sample_weights,
            s.offsets.size(0) == bags + 1, s.padding_idx)[0]
    if needs[1]:
        to_samples = aten._embedding_bag_per_sample_weights_backward(
            s.grad, g, s.indices, s.offsets, s.offset2bag, s.mode, s.padding_idx)
    return to_grad, to_samples


@vjp(aten._embedding_bag_per_sample_weights_backward, "grad weight indices offsets offset2bag",
     wrt="grad weight")
def embedding_bag_per_sample_weights_backward(g, s, needs):
    """Of the product of a sample's row and its bag's gradient: bilinear in the two."""
    bag = s.offset2bag
    live = torch.where(s.indices != s.padding_idx, g, 0).unsqueeze(-1)
    to_grad = to_weight = None
    if needs[0]:
        rows = live * s.weight.index_select(0, s.indices)
        to_grad = torch.zeros_like(s.grad).index_add(0, bag, rows)
    if needs[1]:
        rows = live * s.grad.index_select(0, bag)
        to_weight = torch.zeros_like(s.weight).index_add(0, s.indices, rows)
    return to_grad, to_weight

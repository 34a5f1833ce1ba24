"""Custom functions, each case run under PyTorch and recorded."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import InplaceFunction, once_differentiable
from torch.utils._pytree import tree_leaves

import stowgrad as sg
from tests.parity import both_raise, same


def define(forward, backward=None, setup_context=None, **more):
    """A Function made of plain functions."""
    body = {"forward": staticmethod(forward), **more}
    if backward is not None:
        body["backward"] = staticmethod(backward)
    if setup_context is not None:
        body["setup_context"] = staticmethod(setup_context)
    return type("Made", (Function,), body)


def leaf(*shape):
    return torch.randn(*shape or (3,), dtype=torch.float64, requires_grad=True)


class Exp(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y


class Scale(Function):
    """Saves an input and an intermediate, takes a number, sets up its context apart."""

    @staticmethod
    def forward(x, k):
        return x * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, k = inputs
        ctx.k = k
        ctx.save_for_backward(x, None, x.sin())

    @staticmethod
    def backward(ctx, g):
        x, nothing, s = ctx.saved_tensors
        assert nothing is None
        return g * ctx.k + 0 * x * s, None


apply_exp = Exp.apply  # bound before any recording


@pytest.mark.parametrize(
    "fn", [apply_exp, lambda x: Scale.apply(x, 3), lambda x: Scale.apply(x, k=2)]
)
def test_gradient(fn):
    def run():
        x = leaf()
        y = fn(x)
        (y * y).sum().backward()
        return y, x.grad, y.requires_grad, type(y.grad_fn).__name__, y.grad_fn.name()

    same(run)


def test_second_and_third_derivative():
    def run():
        x = leaf()
        y = Exp.apply(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), x, create_graph=True)
        (k,) = torch.autograd.grad(h.sum(), x)
        return g, h, k

    same(run)


def test_backward_records_only_with_create_graph():
    seen = []
    F = define(
        lambda ctx, x: x * 2, lambda ctx, g: (seen.append(torch.is_grad_enabled()), g * 2)[1]
    )

    def run():
        seen.clear()
        x = leaf()
        y = F.apply(x).sum()
        torch.autograd.grad(y, x, retain_graph=True)
        torch.autograd.grad(y, x, create_graph=True)
        return list(seen)

    assert same(run) == [False, True]


def test_forward_and_setup_run_without_grad_mode_on_the_inputs_themselves():
    def run():
        x = leaf()
        notes = []

        def forward(a):
            notes.append((a is x, torch.is_grad_enabled()))
            return a * 2

        def setup(ctx, inputs, output):
            notes.append((inputs[0] is x, torch.is_grad_enabled(), output.requires_grad))

        define(forward, lambda ctx, g: g, setup).apply(x)
        return notes

    same(run)


def test_context_knows_what_needs_a_gradient_and_keeps_any_attribute():
    def run():
        def forward(ctx, x, y, k, z):
            ctx.needs = ctx.needs_input_grad
            # names that the graph's own nodes use
            ctx.edges, ctx.outputs, ctx.where, ctx.seq, ctx.hooks, ctx.saved = 1, 2, 3, 4, 5, 6
            return x * y

        def backward(ctx, g):
            kept = (ctx.edges, ctx.outputs, ctx.where, ctx.seq, ctx.hooks, ctx.saved)
            seen.append((ctx.needs_input_grad, ctx.needs, kept))
            return g, None, None, None

        seen = []
        x = leaf()
        y = define(forward, backward).apply(x, torch.ones(3), 2, None)
        y.sum().backward()
        return seen, x.grad, y.grad_fn.needs

    same(run)


def test_attributes_set_on_grad_fn_reach_backward():
    def run():
        seen = []
        x = leaf()
        y = define(lambda ctx, x: x * 1, lambda ctx, g: (seen.append(ctx.note), g)[1]).apply(x)
        y.grad_fn.note = "hello"
        y.sum().backward()
        return seen

    same(run)


@pytest.mark.parametrize("materialize", [True, False])
def test_missing_gradients(materialize):
    """An unused output, a non-differentiable one, an integer one, and what is no tensor."""

    def run():
        seen = []

        def forward(ctx, x):
            ctx.set_materialize_grads(materialize)
            a, b, c = x * 2, x * 3, x.argmax()
            ctx.mark_non_differentiable(b)
            return a, b, c, None, "text", x * 4

        def backward(ctx, *grads):
            seen.append(grads)
            return grads[0]

        x = leaf()
        a, b, c, n, t, d = define(forward, backward).apply(x)
        flags = [a.requires_grad, b.requires_grad, c.requires_grad, d.requires_grad]
        a.sum().backward()
        return flags, n, t, seen, x.grad

    same(run)


def test_backward_runs_although_no_gradient_arrives():
    def run():
        seen = []
        F = define(
            lambda ctx, x: (ctx.set_materialize_grads(False), x * 2)[1],
            lambda ctx, g: seen.append(g),
        )
        G = define(lambda ctx, x: x * 2, lambda ctx, g: None)
        x = leaf()
        G.apply(F.apply(x)).sum().backward()
        return seen, x.grad

    same(run)


def test_outputs_keep_their_form():
    def run():
        x = leaf()
        one = define(lambda ctx, x: x * 2, lambda ctx, g: g).apply(x)
        tuple_of_one = define(lambda ctx, x: (x * 2,), lambda ctx, g: g).apply(x)
        listed = define(lambda ctx, x: [x * 2], lambda ctx, g: g).apply(x)
        twice = define(lambda ctx, x: (lambda y: (y, y))(x * 2), lambda ctx, g, h: h).apply(x)
        return [
            type(one).__name__, type(tuple_of_one).__name__, type(listed).__name__,
            listed[0].requires_grad, twice[0] is twice[1], twice[0].output_nr,
        ]  # fmt: skip

    same(run)


def test_not_recorded_without_grad_mode_or_tracked_input():
    def run():
        def forward(ctx, x):
            ctx.save_for_backward(x)
            found.append((ctx.needs_input_grad, ctx.saved_tensors))
            return x

        found = []
        F = define(forward, lambda ctx, g: g)
        x, plain = leaf(), torch.ones(3)
        with torch.no_grad():
            a = F.apply(x)
        b = F.apply(plain)
        return [a is x, a.requires_grad, b is plain, b.requires_grad, b._is_view(), found]

    same(run)


# -- saving


def test_saved_tensors_are_the_tensors_themselves_or_parts_of_the_graph():
    def run():
        notes = []

        def forward(ctx, x, w):
            y = x * w
            ctx.save_for_backward(x, w, y, y * 2)
            return y

        def backward(ctx, g):
            sx, sw, sy, sm = ctx.saved_tensors
            notes.append([sx is x, sw is w, sy.requires_grad, sm.requires_grad])
            notes.append(sy.grad_fn is y.grad_fn)
            return g * sw, g * sx

        w = leaf()
        x = leaf() * 1
        y = define(forward, backward).apply(x, w)
        y.sum().backward()
        return notes, w.grad

    same(run)


def test_hooks_apply_to_what_a_function_saves():
    def run():
        packs, unpacks = [], []

        def pack(t):
            packs.append(tuple(t.shape))
            return t.detach().clone()

        def unpack(t):
            unpacks.append(tuple(t.shape))
            return t

        x = leaf(2, 3)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = Scale.apply(Exp.apply(x), 2)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return packs, unpacks, x.grad

    same(run)


def test_each_access_unpacks_anew():
    def run():
        unpacks = []
        F = define(
            lambda ctx, x: (ctx.save_for_backward(x), x * 2)[1],
            lambda ctx, g: (ctx.saved_tensors, ctx.saved_tensors, g)[2],
        )
        x = leaf()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach(), lambda t: (unpacks.append(1), t)[1]
        ):
            y = F.apply(x)
        y.sum().backward()
        return len(unpacks)

    assert same(run) == 2


def test_raw_saved_tensors_take_hooks():
    def run():
        x = leaf()
        y = Exp.apply(x)
        raw = y.grad_fn._raw_saved_tensors
        raw[0].register_hooks(lambda t: t.clone() * 2, lambda t: t)
        y.sum().backward()
        return len(raw), x.grad

    same(run)


def test_a_saved_tensor_that_changed_is_an_error():
    def run():
        x = leaf()
        y = Exp.apply(x)
        y.add_(1)
        y.sum().backward()

    both_raise(run, "modified by an inplace operation")


def test_saved_tensors_are_gone_after_backward():
    def run():
        y = Exp.apply(leaf())
        y.sum().backward()
        return y.grad_fn.saved_tensors

    def again():
        y = Exp.apply(leaf()).sum()
        y.backward()
        y.backward()

    both_raise(run, "Trying to backward through the graph a second time")
    both_raise(again, "Trying to backward through the graph a second time")


def test_a_function_that_saves_nothing_can_run_backward_twice():
    def run():
        x = leaf()
        y = define(lambda ctx, x: x * 2, lambda ctx, g: g * 2).apply(x)
        g = torch.ones_like(y)
        y.backward(g)
        y.backward(g)
        return x.grad

    same(run)


def test_clear_saved_tensors_on_access():
    def make(times):
        return define(
            lambda ctx, x: (ctx.save_for_backward(x), x * 2)[1],
            lambda ctx, g: ([ctx.saved_tensors for _ in range(times)], g * 2)[1],
            clear_saved_tensors_on_access=True,
        )

    def run(times):
        x = leaf()
        make(times).apply(x).sum().backward()
        return x.grad

    same(lambda: run(1))
    both_raise(lambda: run(2), "can only be accessed once")


def test_boxed_grads_can_be_dropped_while_backward_runs():
    def run():
        def backward(ctx, grads):
            assert type(grads) is list
            a, b = grads
            grads.clear()
            return a + b

        x = leaf()
        F = define(lambda ctx, x: (x * 2, x * 3), backward, boxed_grads_call=True)
        a, b = F.apply(x)
        (a * b).sum().backward()
        return x.grad

    same(run)


def test_nothing_survives_the_graph():
    with sg.record():
        x = leaf()
        y = Exp.apply(x)
        node, data = weakref.ref(y.grad_fn), weakref.ref(y.grad_fn.saved_tensors[0])
        ctx = weakref.ref(y.grad_fn.ctx)
        gc.disable()
        try:
            del y
            assert (node(), data(), ctx()) == (None, None, None)
        finally:
            gc.enable()


# -- in place, views, inputs returned as they are


def dirty(*, times=2, extra=False):
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(times)
        return (x, x.sum()) if extra else x

    return define(forward, lambda ctx, g, *h: g * times)


def test_mark_dirty():
    def run():
        x = leaf()
        t = x * 1
        y = dirty().apply(t)
        (y * y).sum().backward()
        return x.grad, y is t, t._version, t.grad_fn is y.grad_fn

    same(run)


def test_mark_dirty_on_a_later_output():
    def run():
        def forward(ctx, x):
            ctx.mark_dirty(x)
            total = x.sum()
            x.mul_(2)
            return total, x

        x = leaf()
        t = x * 1
        total, y = define(forward, lambda ctx, a, g: 2 * g + a).apply(t)
        (y * y).sum().backward()
        return x.grad, y.output_nr, total

    same(run)


def test_mark_dirty_on_an_untracked_tensor():
    def run():
        def forward(ctx, t, x):
            ctx.mark_dirty(t)
            t.mul_(x)
            ctx.save_for_backward(x)
            return t

        x, t = leaf(), torch.ones(3, dtype=torch.float64)
        y = define(forward, lambda ctx, g: (None, g)).apply(t, x)
        (y * y).sum().backward()
        return x.grad, y is t, t.requires_grad

    same(run)


def test_mark_dirty_on_a_view_changes_the_base():
    def run():
        x = leaf()
        base = x * 1
        view = base[1:]
        y = dirty().apply(view)
        (base * base).sum().backward()
        return x.grad, y is view, base.grad_fn.name(), view.requires_grad

    same(run)


def test_mark_dirty_errors():
    one = define(lambda ctx, x: (ctx.mark_dirty(3), x)[1], lambda ctx, g: g)
    lost = define(lambda ctx, x: (ctx.mark_dirty(x), x.mul_(2), x * 2)[2], lambda ctx, g: g)
    both_raise(lambda: dirty().apply(leaf()), "a leaf Variable that requires grad has been used")
    both_raise(lambda: one.apply(leaf()), "mark_dirty can only accept variables")
    both_raise(lambda: lost.apply(leaf() * 1), "marked as dirty during the forward method")
    both_raise(
        lambda: dirty(extra=True).apply((leaf() * 1)[1:]), "cannot return more than one Tensor"
    )


def test_an_input_that_was_changed_before_its_backward_is_an_error():
    def run():
        x = leaf()
        t = x * 1
        u = t * t
        dirty().apply(t)
        u.sum().backward()

    both_raise(run, "modified by an inplace operation")


def test_an_input_returned_as_it_is_becomes_a_view():
    def run():
        x = leaf()
        y = define(lambda ctx, x: x, lambda ctx, g: g * 2).apply(x)
        (y * y).sum().backward()
        return x.grad, y is x, y._is_view(), y.is_leaf

    same(run)


@pytest.mark.parametrize("forward", [lambda ctx, x: x, lambda ctx, x: x[1:]], ids=["as is", "part"])
def test_views_of_inputs_may_not_be_changed(forward):
    F = define(forward, lambda ctx, g: torch.cat([g, g])[:3] * 2)

    def the_view():
        F.apply(leaf() * 1).mul_(2)

    def the_base():
        t = leaf() * 1
        y = F.apply(t)
        t.mul_(2)
        return y.grad_fn

    both_raise(the_view, "is being modified inplace")
    both_raise(the_base, "modified inplace")


def test_several_views_may_not_be_changed():
    F = define(lambda ctx, x: (x[1:], x[:1]), lambda ctx, g, h: None)
    both_raise(lambda: F.apply(leaf() * 1)[0].mul_(2), "function that returns multiple views")


def test_saving_an_input_returned_as_it_is_needs_a_combined_forward():
    apart = define(lambda x: x, lambda ctx, g: g, lambda ctx, i, o: ctx.save_for_backward(o))
    both_raise(lambda: apart.apply(leaf()), "input that has been returned as-is")


def test_an_output_with_a_graph_of_its_own_gets_the_function_as_producer():
    def run():
        def forward(ctx, x):
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                y = inner.sin() * 2
            ctx.inner, ctx.y = inner, y.detach()
            return y

        x = leaf()
        y = define(forward, lambda ctx, g: g * 3).apply(x)
        y.sum().backward()
        return x.grad, y.grad_fn.name()

    same(run)


def test_functions_nest():
    """A Function whose forward uses another, with a graph of its own, and calls backward on it."""

    def run():
        def forward(ctx, x):
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                y = Exp.apply(Exp.apply(inner))
                (ctx.slope,) = torch.autograd.grad(y.sum(), inner, retain_graph=True)
            ctx.save_for_backward(inner)
            return y.detach()

        def backward(ctx, g):
            with torch.enable_grad():
                inner = ctx.saved_tensors[0].detach().requires_grad_()
                (again,) = torch.autograd.grad(Exp.apply(Exp.apply(inner)).sum(), inner)
            assert torch.equal(again, ctx.slope)
            return g * again

        x = leaf()
        define(forward, backward).apply(x).sum().backward()
        return x.grad

    same(run)


# -- what backward may return


def test_wrong_gradients_are_errors():
    def run(backward, *more):
        F = define(lambda ctx, x, *more: x * 2, lambda ctx, g: backward(g))
        F.apply(leaf(), *more).sum().backward()

    both_raise(lambda: run(lambda g: g, 1), "incorrect number of gradients (expected 2, got 1)")
    both_raise(lambda: run(lambda g: (g, None, 1)), "incorrect number of gradients")
    both_raise(lambda: run(lambda g: (g, g), 1), "gradient different than None at position 2")
    both_raise(lambda: run(lambda g: 3), "expected Variable or None (got int)")
    both_raise(lambda: run(lambda g: g.new_ones(5)), "got [5] but expected shape compatible")
    both_raise(lambda: run(lambda g: g.to("meta")), "expected device cpu but got meta")


def test_gradients_are_made_to_fit():
    """Extra Nones, a broadcast shape, another dtype."""

    def run():
        x = leaf(1, 3)
        F = define(
            lambda ctx, x: x.expand(2, 3) * 1, lambda ctx, g: (g.to(torch.float32), None, None)
        )
        F.apply(x).sum().backward()
        return x.grad, x.grad.dtype

    same(run)


def test_missing_methods_are_errors():
    class Nothing(Function):
        pass

    class OnlyForward(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    both = define(lambda ctx, x: x * 2, lambda ctx, g: g, vjp=staticmethod(lambda ctx, g: g))
    kw = dict(error=NotImplementedError)
    both_raise(lambda: Nothing.apply(leaf()), "must implement the forward function", **kw)
    both_raise(lambda: OnlyForward.apply(leaf()).sum().backward(), "backward or vjp method", **kw)
    both_raise(lambda: both.apply(leaf()).sum().backward(), "both 'backward' and 'vjp'")
    unsaved = define(lambda ctx, x: (ctx.save_for_backward(3), x * 2)[1], lambda ctx, g: g)
    both_raise(lambda: unsaved.apply(leaf()), "can only save variables", TypeError)


def test_vjp_is_another_name_for_backward():
    def run():
        x = leaf()
        F = define(lambda ctx, x: x * 2, vjp=staticmethod(lambda ctx, g: g * 2))
        F.apply(x).sum().backward()
        return x.grad

    same(run)


def test_an_error_in_forward_or_backward_leaves_grad_mode_and_recording_as_they_were():
    def fail(*args):
        raise KeyError("mine")

    with sg.record():
        x = leaf()
        with pytest.raises(KeyError, match="mine"):
            define(fail).apply(x)
        y = define(lambda ctx, x: x * 2, fail).apply(x).sum()
        with pytest.raises(KeyError, match="mine"):
            y.backward()
        assert torch.is_grad_enabled()
        Exp.apply(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


def test_once_differentiable():
    F = define(lambda ctx, x, y: x * y, once_differentiable(lambda ctx, g: (g * 2, g * 3)))

    def run():
        x, y = leaf(), leaf()
        F.apply(x, y).sum().backward()
        return x.grad, y.grad

    def twice():
        x, y = leaf(), leaf()
        a, b = torch.autograd.grad((F.apply(x, y) ** 2).sum(), (x, y), create_graph=True)
        assert a.requires_grad and b.requires_grad
        (a + b).sum().backward()

    same(run)
    both_raise(twice, "differentiate twice a function that was marked with @once_differentiable")


def test_older_base_classes():
    class Double(InplaceFunction):
        @staticmethod
        def forward(ctx, x, inplace=False):
            ctx.inplace = inplace
            if inplace:
                ctx.mark_dirty(x)
                return x.mul_(2)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2, None

    def run():
        x = leaf()
        (Double.apply(x) + Double.apply(x * 1, True)).sum().backward()
        return x.grad

    same(run)


# -- the node's public face


def test_hooks_on_the_node():
    def run():
        seen = []
        x = leaf()
        y = Exp.apply(x)
        fn = y.grad_fn
        fn.register_prehook(lambda gs: (gs[0] * 2,))
        fn.register_hook(lambda gi, go: (seen.append((gi[0], go[0])), (gi[0] * 3,))[1])
        fn.metadata["mine"] = 1
        y.sum().backward()
        return x.grad, seen, y.grad_fn.metadata["mine"], len(fn.next_functions)

    same(run)


def test_context_is_usable_inside_backward():
    def run():
        seen = []

        def backward(ctx, g):
            seen.append([ctx.name(), len(ctx.next_functions), type(ctx.metadata).__name__])
            return g

        define(lambda ctx, x: x * 2, backward).apply(leaf()).sum().backward()
        return seen

    same(run)


def test_gradient_edges_of_custom_functions():
    def run():
        x = leaf()
        y = Exp.apply(x)
        z = (y * y).sum()
        edge = torch.autograd.graph.get_gradient_edge(y)
        (g,) = torch.autograd.grad(z, [edge], retain_graph=True)
        (h,) = torch.autograd.grad(edge, x, torch.ones_like(y))
        return g, h

    same(run)


# -- ops registered with torch.library


@pytest.fixture
def library():
    with torch.library._scoped_library("stowgrad_test", "FRAGMENT") as lib:
        yield lib


def test_a_custom_op_uses_the_formula_registered_for_it(library):
    calls = []

    @torch.library.custom_op("stowgrad_test::scale", mutates_args=())
    def scale(x: torch.Tensor, k: float) -> torch.Tensor:
        calls.append("forward")
        return x * k

    def setup(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.k = inputs[1]

    def backward(ctx, g):
        (out,) = ctx.saved_tensors
        return g * ctx.k + out, None

    scale.register_autograd(backward, setup_context=setup)

    def run():
        calls.clear()
        x = leaf()
        y = (scale(x, 2.0) ** 2).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
        with torch.no_grad():
            quiet = scale(x, 3.0)
        return g, h, quiet, calls

    assert same(run)[3] == ["forward", "forward"]


def test_a_custom_op_with_lists_and_keywords(library):
    library.define("two(Tensor x, Tensor[] ys, *, float k) -> (Tensor, Tensor[])")
    library.impl("two", lambda x, ys, k: (x * k, [y * k for y in ys]), "CompositeExplicitAutograd")

    def setup(ctx, inputs, keyword_only_inputs, output):
        ctx.k = keyword_only_inputs["k"]

    def backward(ctx, g, gs):
        return g * ctx.k, [None if h is None else h * ctx.k for h in gs]

    torch.library.register_autograd(
        "stowgrad_test::two", backward, setup_context=setup, lib=library
    )

    def run():
        x, y = leaf(), leaf()
        a, (b, c) = torch.ops.stowgrad_test.two(x, [y, torch.ones(2)], k=3.0)
        (a * b).sum().backward()
        return x.grad, y.grad, c

    same(run)


def test_a_custom_op_without_formula_says_so(library):
    @torch.library.custom_op("stowgrad_test::bare", mutates_args=())
    def bare(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    both_raise(lambda: bare(leaf()).sum().backward(), "no autograd formula was registered")


def test_an_op_whose_python_kernel_applies_a_function(library):
    library.define("plain(Tensor x) -> Tensor")

    class Plain(Function):
        @staticmethod
        def forward(ctx, x):
            with torch._C._AutoDispatchBelowAutograd():
                return torch.ops.stowgrad_test.plain(x)

        @staticmethod
        def backward(ctx, g):
            return g * 5

    library.impl("plain", lambda x: x * 2, "CPU")
    library.impl("plain", lambda x: Plain.apply(x) * x, "Autograd")

    def run():
        x = leaf()
        torch.ops.stowgrad_test.plain(x).sum().backward()
        return x.grad

    same(run)


# -- Functions that PyTorch itself uses


def functions_of_pytorchs_own_tests():
    from torch.testing._internal.autograd_function_db import autograd_function_db

    return [pytest.param(info, id=info.name) for info in autograd_function_db]


@pytest.mark.parametrize("info", functions_of_pytorchs_own_tests())
def test_pytorchs_sample_functions_twice_differentiated(info):
    def run():
        results = []
        for sample in info.sample_inputs("cpu", torch.float64, requires_grad=True):
            inputs = [t for t in tree_leaves((sample.input, sample.args)) if is_tracked(t)]
            out = info.op(sample.input, *sample.args, **sample.kwargs)
            total = sum((o * o).sum() for o in tree_leaves(out) if is_tracked(o))
            first = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True)
            results += [out, first]
            more = sum((g * g).sum() for g in first if is_tracked(g))
            if is_tracked(more):
                results.append(torch.autograd.grad(more, inputs, allow_unused=True))
        return results

    same(run)


def is_tracked(value):
    return isinstance(value, torch.Tensor) and value.requires_grad


def test_full_backward_hooks_of_modules():
    def run():
        torch.manual_seed(0)
        seen = []
        model = torch.nn.Linear(3, 2).double()
        model.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,))
        model.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0], go[0])))
        x = leaf(4, 3)
        (model(x) ** 2).sum().backward()
        return seen, x.grad, model.weight.grad

    same(run)


def test_vmap_over_a_function():
    class Twice(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, g):
            return g * 2 + 0 * ctx.saved_tensors[0]

    class Mine(Twice):
        generate_vmap_rule = False

        @staticmethod
        def vmap(info, in_dims, x):
            return Twice.apply(x), in_dims[0]

    def run():
        x = leaf(4, 3)
        a = torch.vmap(Twice.apply)(x)
        b = torch.vmap(Mine.apply, in_dims=1)(x)
        (a.sum() + (b * b).sum()).backward()
        return a, b, x.grad

    same(run)


def test_gradcheck_with_missing_gradients():
    class TwoOutputs(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            ctx.set_materialize_grads(False)
            return x * y, x.sin()

        @staticmethod
        def backward(ctx, g, h):
            x, y = ctx.saved_tensors
            by_x = [] if g is None else [g * y]
            by_x += [] if h is None else [h * x.cos()]
            return sum(by_x) if by_x else None, None if g is None else g * x

    def run():
        inputs = leaf(), leaf()
        return [
            torch.autograd.gradcheck(TwoOutputs.apply, inputs),
            torch.autograd.gradgradcheck(TwoOutputs.apply, inputs),
            torch.autograd.gradcheck(Exp.apply, inputs[0], check_batched_grad=True, fast_mode=True),
        ]

    same(run)

    def careless():
        F = define(
            lambda ctx, x: (ctx.set_materialize_grads(False), x * 2)[1], lambda ctx, g: g * 2
        )
        torch.autograd.gradcheck(F.apply, leaf())

    both_raise(careless, "NoneType", TypeError)

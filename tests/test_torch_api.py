"""PyTorch's public autograd names while recording: the same code, run both ways, does the same."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import (
    GradientEdge,
    Node,
    allow_mutation_on_saved_tensors,
    get_gradient_edge,
    increment_version,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import stowgrad as sg
from stowgrad._private import native_grad_fn
from tests.parity import both_raise, same


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape or (3,), dtype=dtype, requires_grad=True)


# -- torch.autograd.graph


def test_save_on_cpu():
    def run():
        x = leaf()
        with save_on_cpu():
            y = (x.sin() * x).sum()
        y.backward()
        return x.grad

    same(run)


def test_subclasses_of_saved_tensors_hooks_nest():
    class Count(saved_tensors_hooks):
        def __init__(self):
            self.packs = 0
            super().__init__(self.pack, lambda t: t)

        def pack(self, t):
            self.packs += 1
            return t.detach()

    def run():
        x = leaf()
        outer, inner = Count(), Count()
        with outer:
            y = x.sin()
            with inner:
                y = y.cos()
            y = y * x
        y.sum().backward()
        return outer.packs, inner.packs, x.grad

    same(run)


def test_disabled_hooks():
    def run():
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                pass

    both_raise(run, "not here")


@pytest.mark.parametrize("mode", ["all", "any"])
def test_multi_grad_hooks(mode):
    def run():
        seen = []
        a, b = leaf(), leaf()
        c, d = a * b, a * b
        hook = register_multi_grad_hook(
            (a, b, c, d),
            lambda grads: seen.append([g is not None for g in grads] if mode == "all" else grads),
            mode=mode,
        )
        c.sum().backward(retain_graph=True)
        c.sum().backward(inputs=(a,), retain_graph=True)
        torch.autograd.grad((c * d).sum(), (c, d), retain_graph=True)
        hook.remove()
        c.sum().backward()
        return seen

    same(run)


def test_gradient_edges_as_inputs_and_outputs():
    def run():
        x, w = leaf(), leaf()
        y = x * w
        z = y.sin()
        total = z.sum()
        edges = [get_gradient_edge(t) for t in (x, y, z, total)]
        results = list(torch.autograd.grad(total, edges[:3], retain_graph=True))
        results += torch.autograd.grad(edges[3], [w, edges[1]], retain_graph=True)
        results += torch.autograd.grad(edges[2], x, torch.ones(3), retain_graph=True)
        torch.autograd.backward(edges[3], retain_graph=True)
        torch.autograd.backward([edges[2]], [torch.ones(3)], inputs=[x], retain_graph=True)
        by_hand = GradientEdge(z.grad_fn, z.output_nr)
        results += torch.autograd.grad(total, by_hand)
        return results, x.grad, w.grad, [e.output_nr for e in edges]

    same(run)


def test_a_gradient_edge_keeps_its_graph_alive():
    def run():
        x = leaf()
        y = x.exp()
        edge = get_gradient_edge(y)
        del y
        return torch.autograd.grad(edge, x, torch.ones(3, dtype=torch.float64))

    same(run)


def test_gradient_edge_errors():
    both_raise(lambda: get_gradient_edge(torch.ones(2)), "does not require gradients")

    def wrong_shape():
        torch.autograd.grad(get_gradient_edge(leaf() * 2), leaf(), torch.ones(4))

    both_raise(wrong_shape, "Mismatch in shape")


def test_increment_version_is_seen():
    def run():
        x = leaf()
        w = torch.ones(3, dtype=torch.float64)
        y = (x * w).sum()
        increment_version(w)
        y.backward()

    both_raise(run, "modified by an inplace operation")


def test_mutation_on_saved_tensors_can_be_allowed():
    def run():
        with allow_mutation_on_saved_tensors():
            x = leaf()
            a = x * 1
            y = (a**2).sum()
            a.sin_()
            b = x * 2
            view = b[:2]
            z = (view * view).sum()
            b.mul_(3)
            y.backward()
            z.backward()
        return x.grad

    same(run)


def test_nodes_answer_as_pytorchs():
    def run():
        x, w = leaf(), leaf()
        y = x * w
        fn = y.grad_fn
        fn.metadata["mine"] = 3
        leaf_fn, index = fn.next_functions[0]
        return [
            isinstance(fn, Node), isinstance(leaf_fn, Node),
            fn.name(), type(fn).__name__, index, leaf_fn.variable is x, leaf_fn.name(),
            y.grad_fn.metadata["mine"], y.output_nr, x.output_nr, x.grad_fn is None,
            leaf_fn.next_functions, fn._saved_self is x, fn._saved_other is w,
        ]  # fmt: skip

    same(run)


def test_hooks_on_nodes_of_ops():
    def run():
        seen = []
        x = leaf()
        y = x * 2
        z = y.exp()
        y.grad_fn.register_prehook(lambda gs: seen.append(("pre", gs[0])))
        y.grad_fn.register_hook(lambda gi, go: (gi[0] * 2, *gi[1:]))
        z.grad_fn.register_prehook(lambda gs: (gs[0] * 3,))
        x_node = y.grad_fn.next_functions[0][0]
        handle = x_node.register_prehook(lambda gs: (gs[0] + 1,))
        x_node.register_hook(lambda gi, go: seen.append(("leaf", len(gi), go[0].clone())))
        z.sum().backward(retain_graph=True)
        handle.remove()
        z.sum().backward()
        return seen, x.grad

    same(run)


def test_raw_saved_tensors_of_ops_take_hooks_once():
    def run():
        x = leaf()
        y = x * x.sin()
        saved = y.grad_fn._raw_saved_self
        saved.register_hooks(lambda t: t.detach() * 2, lambda t: t)
        y.sum().backward()
        return x.grad

    def twice():
        y = leaf() ** 2
        saved = y.grad_fn._raw_saved_self
        for _ in range(2):
            saved.register_hooks(lambda t: t, lambda t: t)

    same(run)
    both_raise(twice, "hooks")


# -- tensor hooks


def test_tensor_hooks_run_in_pytorchs_order():
    def run():
        seen = []

        def note(name, factor=None):
            def hook(*args):
                seen.append(name)
                return None if factor is None else args[0] * factor

            return hook

        x = leaf()
        y = x * 2
        y.register_hook(note("y1", 2))
        y.retain_grad()
        y.register_hook(note("y2", 3))
        y.grad_fn.register_prehook(note("y pre"))
        y.grad_fn.register_hook(note("y post"))
        x.register_hook(note("x1", 5))
        x.register_post_accumulate_grad_hook(note("x post"))
        handle = x.register_hook(note("removed"))
        handle.remove()
        (y * y).sum().backward()
        return seen, x.grad, y.grad

    same(run)


def test_tensor_hooks_and_grad_mode():
    def run():
        seen = []
        x = leaf()
        y = x * 2
        y.register_hook(lambda g: seen.append((torch.is_grad_enabled(), g.requires_grad)))
        torch.autograd.grad((y**2).sum(), x, retain_graph=True)
        torch.autograd.grad((y**2).sum(), x, create_graph=True)
        return seen

    same(run)


def test_hooks_on_leaves_registered_before_recording():
    x = leaf()
    x.register_hook(lambda g: g * 2)
    seen = []
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    with sg.record():
        (x * x).sum().backward()
    torch.testing.assert_close(x.grad, 4 * x.detach())
    torch.testing.assert_close(seen[0], x.grad)


def test_an_optimizer_in_post_accumulate_hooks():
    def run():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        steps = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(p):
            steps[p].step()
            steps[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(torch.randn(5, 3)).square().mean().backward()
        return [p.detach().clone() for p in model.parameters()], [
            p.grad for p in model.parameters()
        ]

    same(run)


def test_retain_grad_through_in_place_ops():
    def run():
        x = leaf()
        y = x * 2
        y.retain_grad()
        before = y.retains_grad
        y.mul_(3)
        (y * y).sum().backward()
        return x.grad, y.grad, before, y.retains_grad, x.retains_grad

    same(run)


def test_hook_errors():
    def not_tracked():
        torch.ones(2).register_hook(lambda g: g)

    def changes_shape():
        x = leaf()
        y = x * 2
        y.register_hook(lambda g: g[:1])
        y.sum().backward()

    both_raise(not_tracked, "doesn't require gradient")
    both_raise(changes_shape, "has changed the s")


def test_queued_callbacks_run_when_backward_is_done():
    def run():
        seen = []
        x = leaf()

        def hook(g):
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: seen.append(("done", x.grad is not None)))
            seen.append("hook")

        y = x * 2
        y.register_hook(hook)
        y.sum().backward()
        return seen

    same(run)


# -- anomaly detection


@pytest.mark.parametrize("how", ["context", "switch"])
def test_anomaly_detection_names_the_op(how):
    def fail():
        x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        y = (x.sqrt() * 0).sum()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                y.backward()
            finally:
                assert any("fail" in str(w.message) for w in caught), [
                    str(w.message) for w in caught
                ]

    def run():
        if how == "context":
            with torch.autograd.detect_anomaly():
                fail()
        else:
            with torch.autograd.set_detect_anomaly(True):
                fail()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both_raise(run, "SqrtBackward0' returned nan values in its 0th output")


def test_anomaly_detection_without_nan_check_and_without_anomaly():
    def run():
        x = leaf()
        with torch.autograd.detect_anomaly(check_nan=False):
            torch.nn.functional.relu(x * float("nan")).sum().backward()
        with torch.autograd.detect_anomaly():
            (x * 2).sum().backward()
        return x.grad

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(run)


# -- torch.autograd.functional


def cube(x):
    return (x**3).sum()


def pair(x, y):
    return x * y.sum(), y.exp()


FUNCTIONAL = {
    "jacobian": lambda f, x, y: f.jacobian(pair, (x, y)),
    "jacobian vectorized": lambda f, x, y: f.jacobian(pair, (x, y), vectorize=True),
    "jacobian create_graph": lambda f, x, y: torch.autograd.grad(
        f.jacobian(lambda x: x**3, x, create_graph=True).sum(), x
    ),
    "hessian": lambda f, x, y: f.hessian(cube, x),
    "hessian vectorized": lambda f, x, y: f.hessian(cube, x, vectorize=True),
    "vjp": lambda f, x, y: f.vjp(pair, (x, y), (torch.ones_like(x), torch.ones_like(y))),
    "jvp": lambda f, x, y: f.jvp(pair, (x, y), (torch.ones_like(x), torch.ones_like(y))),
    "vhp": lambda f, x, y: f.vhp(cube, x, torch.ones_like(x)),
    "hvp": lambda f, x, y: f.hvp(cube, x, torch.ones_like(x)),
    "strict": lambda f, x, y: f.jacobian(lambda x: x * 2, x, strict=True),
}


@pytest.mark.parametrize("what", FUNCTIONAL)
def test_functional(what):
    same(lambda: FUNCTIONAL[what](torch.autograd.functional, leaf(), leaf(2)))


# -- grad mode, inference mode, detaching


def test_grad_modes():
    @torch.no_grad()
    def quiet(t):
        return t * 2

    def run():
        x = leaf()
        flags = [quiet(x).requires_grad]
        with torch.set_grad_enabled(False):
            flags.append((x * 2).requires_grad)
            with torch.enable_grad():
                flags.append((x * 2).requires_grad)
        torch.set_grad_enabled(False)
        flags.append((x * 2).requires_grad)
        torch.set_grad_enabled(True)
        flags.append((x * 2).requires_grad)
        return flags

    same(run)


def test_inference_mode():
    def run():
        x = leaf()
        with torch.inference_mode():
            y = x * 2
            flags = [y.requires_grad, y.is_inference(), torch.is_inference_mode_enabled()]
            with torch.inference_mode(False):
                z = x * 3
                flags += [z.requires_grad, z.is_inference(), torch.is_grad_enabled()]
        with torch.inference_mode(False):
            w = x * 4
            view = w[1:]
            view.mul_(2)
        (z.sum() + w.sum()).backward()
        return x.grad, flags, y.clone() * 1, w._version, view._is_view()

    same(run)


def test_inference_tensors_cannot_be_saved():
    def run():
        with torch.inference_mode():
            t = torch.ones(3, dtype=torch.float64)
        return leaf() * t

    both_raise(run, "nference tensor")


def test_inference_mode_leaves_recording_as_it_was():
    with sg.record():
        with torch.inference_mode():
            pass
        with pytest.raises(KeyError), torch.inference_mode(False):
            raise KeyError
        x = leaf()
        with torch.inference_mode(False):
            assert native_grad_fn(x * 2) is None, "PyTorch's own autograd took part"
        (x * 2).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x.detach(), 2))
        assert type((x * 2).grad_fn).__module__.startswith("stowgrad")


@pytest.mark.parametrize("grad_mode", [True, False])
def test_detach_in_place(grad_mode):
    def run():
        x = leaf()
        y = x * 2
        z = y * 3
        with torch.set_grad_enabled(grad_mode):
            same_one = y.detach_() is y
        flags = [same_one, y.requires_grad, y.is_leaf, y.grad_fn is None, z.requires_grad]
        (z.sum() + (y * x).sum()).backward()
        return flags, x.grad, torch.ones(2).detach_()

    same(run)
    both_raise(lambda: (leaf() * 1)[1:].detach_(), "Can't detach views in-place")


def test_detach_and_data():
    def run():
        x = leaf()
        y = x * 2
        d = y.detach()
        flags = [d.requires_grad, d.data_ptr() == y.data_ptr(), y.data.requires_grad]
        x.data.mul_(2)
        version = x._version
        d.add_(1)
        return flags, version, y._version, y.data, x.data

    same(run)


def test_setting_data():
    def run():
        x = leaf()
        y = x * 2
        x.data = torch.ones(3, dtype=torch.float64)
        (x * y).sum().backward()
        return x.grad, x

    same(run)


def test_requires_grad_can_be_set_on_leaves_only():
    def run():
        x = torch.ones(3)
        x.requires_grad_()
        view = torch.ones(4)[1:].requires_grad_()
        (view * 2).sum().backward()
        y = x * 2
        y.requires_grad_()
        x.requires_grad = False
        return x.requires_grad, y.requires_grad, view.grad, view.is_leaf

    def off():
        (leaf() * 2).requires_grad_(False)

    def whole_numbers():
        torch.ones(3, dtype=torch.int64).requires_grad_()

    same(run)
    both_raise(off, "you can only change requires_grad flags of leaf variables")
    both_raise(whole_numbers, "floating point")


def test_gradients_can_be_set_and_deleted():
    def run():
        x = leaf()
        x.grad = torch.ones(3, dtype=torch.float64)
        (x * 2).sum().backward()
        first = x.grad.clone()
        x.grad = None
        (x * 2).sum().backward()
        del x.grad
        return first, x.grad

    def wrong_shape():
        leaf().grad = torch.ones(5, dtype=torch.float64)

    same(run)
    both_raise(wrong_shape, "attempting to assign a gradient of size")


# -- copying and saving


def test_copies_of_leaves_and_modules_are_new_leaves():
    def run():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).double()
        x = leaf()
        model(x).sum().backward()
        twin, y = copy.deepcopy(model), copy.deepcopy(x)
        (twin(y) ** 2).sum().backward()
        return [twin.weight.grad, model.weight.grad, y.grad, x.grad, y.is_leaf]

    same(run)
    both_raise(lambda: copy.deepcopy(leaf() * 2), "Only Tensors created explicitly by the user")


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickling(how):
    def through(value):
        if how == "pickle":
            return pickle.loads(pickle.dumps(value))
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=isinstance(value, Tensor))

    def run():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).double()
        x = leaf()
        y = model(x)
        again = through(model)
        z = through(x)
        (again(z) ** 2).sum().backward()
        return again.weight.grad, z.grad, z.requires_grad, through(y.detach()), through(y.data)

    same(run)


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = torch.full((2,), float(i), requires_grad=True)
        (x * x).sum().backward()
        return x.detach(), x.grad


def test_a_data_loader_with_workers():
    def run():
        w = torch.ones(2, requires_grad=True)
        loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=1)
        for x, g in loader:
            (w * x * g).sum().backward()
        return w.grad

    same(run)


# -- dispatch modes of the user's


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def forward_ops(model, x):
    y = torch.nn.functional.layer_norm(model(x), (4,)).relu()
    y = y.view(-1)[2:]
    return (y * y).sum()


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_a_mode_sees_the_ops_below_autograd(order):
    """The same ops as under PyTorch, whichever of the mode and the recording began first."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4).double()
    x = leaf(2, 3)

    def run(log):
        with log:
            loss = forward_ops(model, x)
        forward = list(log.names)
        with log:
            loss.backward()
        return forward, log.names[len(forward) :]

    expected = run(Log())[0]
    if order == "inside":
        with sg.record():
            actual, in_backward = run(Log())
    else:
        log = Log()
        with log, sg.record():
            loss = forward_ops(model, x)
        actual = list(log.names)
        with log, sg.record():
            loss.backward()
        in_backward = log.names[len(actual) :]
    drop = {"aten.detach.default"}
    assert [n for n in actual if n not in drop] == [n for n in expected if n not in drop]
    assert any("mm" in n for n in in_backward)
    assert sum("view" in n for n in actual) == sum("view" in n for n in expected)


def test_modes_nest_and_leave_the_recorder_in_place():
    with sg.record():
        x = leaf()
        outer, inner = Log(), Log()
        with outer:
            y = x.sin()
            with inner:
                y = y.cos()
            y = y.exp()
        y.sum().backward()
        with pytest.raises(KeyError), Log():
            raise KeyError
        assert (x * 2).grad_fn is not None
    assert outer.names[:2] == ["aten.sin.default", "aten.cos.default"]
    assert inner.names == ["aten.cos.default"]
    torch.testing.assert_close(
        x.grad, torch.autograd.grad(x.sin().cos().exp().sum(), x)[0].detach()
    )


def test_a_mode_may_change_results():
    class Twice(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.ops.aten.sin.default else out

    def run():
        x = leaf()
        with Twice():
            y = x.sin() * x
        y.sum().backward()
        return y, x.grad

    same(run)


def test_flop_counter():
    def run():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 5)
        )
        counter = FlopCounterMode(display=False)
        with counter:
            model(torch.randn(2, 2, 6, 6, requires_grad=True)).square().sum().backward()
        counts = counter.get_flop_counts()
        return {k: {str(op): n for op, n in v.items()} for k, v in counts.items()}

    same(run)


def test_function_modes_and_default_devices():
    class Names(torch.overrides.TorchFunctionMode):
        def __init__(self):
            self.names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    def run():
        names = Names()
        x = leaf()
        with names, torch.device("cpu"):
            y = torch.sin(x) * torch.ones(3)
        y.sum().backward()
        return names.names, x.grad

    same(run)


class Named(Tensor):
    """A subclass of the plainest kind; what is computed from it is of it too."""


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * g * x


def test_gradients_pass_through_as_subclass():
    def run():
        x, w = leaf(3, 4).detach().as_subclass(Named), leaf(2, 4)
        y = Square.apply(torch.nn.functional.linear(x, w).tanh())
        y.sum().backward()
        y = (w * 2).as_subclass(Named)
        y.mul_(3)  # a view of what it was made from, as under PyTorch
        (y * w.as_subclass(Named)).as_subclass(Tensor).sum().backward()
        base = torch.zeros(2, 4, dtype=torch.float64)
        base.as_subclass(Named).add_(w)
        base.square().sum().backward()
        return w.grad, type(w.grad).__name__, type(y).__name__, y.requires_grad, base.requires_grad

    same(run)


def test_a_backward_goes_past_the_overrides_of_subclasses_and_modes():
    seen = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    def run():
        w = leaf(2, 4)
        loss = torch.nn.functional.linear(leaf(3, 4).detach().as_subclass(Watched), w)
        loss = Square.apply(loss).as_subclass(Tensor).sum()
        seen.clear()
        with torch.device("cpu"):
            loss.backward()
        ops = [name for name in seen if name != "__get__"]  # those of Square.backward
        return ops, w.grad, type(w.grad).__name__

    same(run)


def test_custom_functions_within_function_modes():
    def run():
        x = leaf()
        with torch.device("cpu"):
            Square.apply(x).sum().backward()
        return x.grad

    same(run)


# -- ops that give a tensor other memory


def test_set_and_resize():
    def plain():
        t = torch.zeros(3, dtype=torch.float64)
        t.set_(torch.ones(2, dtype=torch.float64))
        x = leaf()
        with torch.no_grad():
            x.set_(torch.ones(2, dtype=torch.float64))
        (x * x * t).sum().backward()
        t.resize_(5)
        return x.grad, t.shape

    def from_tracked():
        t = torch.zeros(3, dtype=torch.float64)
        t.set_(leaf() * 2)
        t.sum().backward()

    same(plain)
    both_raise(
        lambda: leaf().set_(torch.ones(2, dtype=torch.float64)), "leaf Variable that requires grad"
    )
    both_raise(
        lambda: (leaf() * 1).set_(leaf().detach()).sum().backward(), "set_ is not implemented"
    )
    both_raise(from_tracked, "set_ is not implemented")
    both_raise(lambda: (leaf() * 1).resize_(5), "cannot resize variables that require grad")

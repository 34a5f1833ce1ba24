"""Unmodified training code gives PyTorch's numbers, step by step, from the same seed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset

import stowgrad as sg
from tests.parity import same

# What PyTorch says of the hooks that are tried here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning"),
]


def leaf(*values: float) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=torch.float32, requires_grad=True)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def values_of(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def grads_of(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


# -- optimizers


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **how),
    "Adam": lambda p, **how: torch.optim.Adam(p, lr=0.01, **how),
    "AdamW": lambda p, **how: torch.optim.AdamW(p, lr=0.01, **how),
}


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_optimizers_and_clipping(optimizer: str, how: dict[str, bool]) -> None:
    def program() -> Any:
        net = small_net()
        step = OPTIMIZERS[optimizer](net.parameters(), **how)
        data, losses = torch.randn(5, 4), []
        for i in range(5):
            step.zero_grad(set_to_none=i % 2 == 0)
            loss = net(data).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.3, foreach=how.get("foreach"))
            step.step()
            losses.append((loss.item(), norm))
        return losses, values_of(net)

    same(program)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.01),
        lambda p: torch.optim.LBFGS(p, max_iter=3),
        lambda p: torch.optim.SGD(p, lr=0.1, nesterov=True, momentum=0.9),
    ],
    ids=["RMSprop", "Adagrad", "Adafactor", "LBFGS", "Nesterov"],
)
def test_optimizers_with_a_closure_and_a_schedule(make: Any) -> None:
    def program() -> Any:
        net = small_net()
        optimizer = make(net.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        data = torch.randn(5, 4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = net(data).square().mean()
            loss.backward()
            return loss

        losses = []
        for _ in range(3):
            losses.append(optimizer.step(closure).item())
            schedule.step()
        return losses, values_of(net)

    same(program)


def test_an_optimizer_step_within_the_backward() -> None:
    """Each parameter is updated, and its gradient dropped, as soon as that is whole."""

    def program() -> Any:
        net = small_net()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

        def step(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            net(torch.ones(2, 4)).square().mean().backward()
        return values_of(net), grads_of(net)

    assert same(program)[1] == [None] * 4


def test_clipping_by_value_and_by_total_norm() -> None:
    def program() -> Any:
        net = small_net()
        net(torch.ones(2, 4)).square().sum().backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.05)
        total = nn.utils.get_total_norm([p.grad for p in net.parameters()])
        nn.utils.clip_grads_with_norm_(net.parameters(), 0.01, total)
        return total, grads_of(net)

    same(program)


def test_parameters_as_one_vector() -> None:
    def program() -> Any:
        net = small_net()
        vector = nn.utils.parameters_to_vector(net.parameters())
        vector.square().sum().backward()
        nn.utils.vector_to_parameters(vector.detach() * 2, net.parameters())
        return grads_of(net), values_of(net)

    same(program)


def test_averaged_models() -> None:
    def program() -> Any:
        net = small_net()
        average = torch.optim.swa_utils.AveragedModel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            average.update_parameters(net)
        return values_of(average)

    same(program)


# -- autocast


def test_autocast_with_a_gradient_scaler() -> None:
    def program() -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        data, log = torch.randn(5, 4), []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = net(data)
                loss = out.float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            log.append((out.dtype, loss.item(), norm.item(), scaler.get_scale()))
        return log, values_of(net), [p.grad.dtype for p in net.parameters()]

    same(program)


def test_a_gradient_scaler_skips_a_step_that_overflows() -> None:
    def program() -> Any:
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        log = []
        for factor in (1.0, 1e38, 1.0):
            optimizer.zero_grad()
            scaler.scale((net(torch.ones(1, 2)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            log.append((scaler.get_scale(), values_of(net)))
        return log

    scales = [scale for scale, _ in same(program)]
    assert scales[1] < scales[0]


def test_autocast_nested_and_switched_off() -> None:
    def program() -> Any:
        net = small_net()
        data = torch.randn(5, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = net(data)
            with torch.autocast("cpu", enabled=False):
                high = net(data)
            again = net(data)  # from the cache of cast weights
        (low.float() + high + again.float()).sum().backward()
        return low.dtype, high.dtype, grads_of(net)

    same(program)


def test_a_backward_within_autocast() -> None:
    def program() -> Any:
        net = small_net()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net(torch.ones(5, 4)).sum().backward()
        return grads_of(net)

    same(program)


def test_modules_in_bfloat16() -> None:
    def program() -> Any:
        net = small_net().to(torch.bfloat16)
        net(torch.ones(5, 4, dtype=torch.bfloat16)).sum().backward()
        return grads_of(net)

    same(program)


# -- modules


@pytest.mark.parametrize(
    "parametrize",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"),
        lambda m: parametrizations.orthogonal(m, orthogonal_map="householder"),
        nn.utils.spectral_norm,
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "cayley", "householder", "old spectral"],
)
def test_parametrizations(parametrize: Any) -> None:
    def program() -> Any:
        layer = parametrize(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        return grads_of(layer), values_of(layer), layer.weight

    torch.manual_seed(0)
    want = program()
    torch.manual_seed(0)
    with sg.record():
        found = program()
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_module_hooks() -> None:
    def program() -> Any:
        log: list[Any] = []
        net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))

        def note(name: str) -> Any:
            return lambda m, *grads: log.append(
                (name, [[None if g is None else g.tolist() for g in part] for part in grads])
            )

        net[0].register_forward_pre_hook(lambda m, args: log.append("before"))
        net[0].register_forward_hook(lambda m, args, out: out * 2)
        net[0].register_full_backward_hook(note("first"))
        net[1].register_full_backward_hook(note("relu"))
        net[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
        net[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
        for x in (leaf().view(1, 2), torch.ones(1, 2)):
            net(x).sum().backward()
        with nn.modules.module.register_module_full_backward_hook(
            lambda m, gi, go: log.append(type(m).__name__)
        ):
            net(torch.ones(1, 2)).sum().backward()
        return log, grads_of(net)

    assert "Sequential" in same(program)[0]


def test_module_hooks_registered_before_recording() -> None:
    def program(record: Any) -> Any:
        torch.manual_seed(0)
        log: list[Any] = []
        net = small_net()
        net[0].register_full_backward_hook(lambda m, gi, go: log.append(go[0].tolist()))
        net[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
        with record:
            net(torch.ones(1, 4)).sum().backward()
        return log, [g.tolist() for g in grads_of(net)]

    assert program(sg.record()) == program(torch.enable_grad())


def test_old_backward_hooks() -> None:
    def program() -> Any:
        log: list[Any] = []
        net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        net[1].register_backward_hook(
            lambda m, gi, go: log.append((gi[0].tolist(), go[0].tolist()))
        )
        net(leaf().view(1, 2)).sum().backward()
        return log

    assert len(same(program)) == 1


def test_functional_call() -> None:
    def program() -> Any:
        net = small_net()
        own = {k: v.detach().clone().requires_grad_() for k, v in net.named_parameters()}
        torch.func.functional_call(net, own, (torch.ones(1, 4),)).sum().backward()
        computed = {k: v * 2 for k, v in own.items()}
        torch.func.functional_call(net, computed, (torch.ones(1, 4),)).sum().backward()
        return [v.grad for v in own.values()], grads_of(net)

    assert same(program)[1] == [None] * 4


def test_an_inner_update_that_is_differentiated() -> None:
    """One step of gradient descent inside, as meta-learning does."""

    def program() -> Any:
        net = small_net()
        params = dict(net.named_parameters())
        loss = net(torch.ones(2, 4)).square().sum()
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        new = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads, strict=True)}
        torch.func.functional_call(net, new, (torch.ones(2, 4),)).square().sum().backward()
        return grads_of(net)

    torch.manual_seed(0)
    want = program()
    torch.manual_seed(0)
    with sg.record():
        found = program()
    torch.testing.assert_close(found, want)


def test_frozen_layers_and_tied_weights() -> None:
    def program() -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
        net[0].requires_grad_(False)
        net[3].weight = net[2].weight
        net(torch.ones(2, 4)).sum().backward()
        return grads_of(net)

    same(program)


def test_buffers_and_modes() -> None:
    def program() -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        log = []
        for training in (True, False, True):
            net.train(training)
            net.zero_grad()
            net(torch.randn(6, 4)).square().sum().backward()
            log.append((grads_of(net), [b.clone() for b in net.buffers()]))
        return log

    torch.manual_seed(0)
    want = program()
    torch.manual_seed(0)
    with sg.record():
        found = program()
    torch.testing.assert_close(found, want)


def test_gradient_accumulation_over_batches() -> None:
    def program() -> Any:
        net = small_net()
        for _ in range(4):
            (net(torch.randn(2, 4)).square().mean() / 4).backward()
        return grads_of(net)

    same(program)


def test_two_losses_of_one_network() -> None:
    def program() -> Any:
        net = small_net()
        out = net(torch.ones(2, 4))
        out[:, 0].sum().backward(retain_graph=True)
        out[:, 1].square().sum().backward()
        return grads_of(net)

    same(program)


def test_a_generator_and_a_discriminator() -> None:
    def program() -> Any:
        make, judge = small_net(), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
        steps = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (make, judge)]
        for _ in range(3):
            fake = make(torch.randn(5, 4))
            steps[1].zero_grad()
            (judge(fake.detach()).mean() - judge(torch.ones(5, 2)).mean()).backward()
            steps[1].step()
            steps[0].zero_grad()
            judge.requires_grad_(False)
            (-judge(fake).mean()).backward()
            judge.requires_grad_(True)
            steps[0].step()
        return values_of(make), values_of(judge)

    same(program)


# -- data, copies, files


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        x = torch.full((2,), float(i), requires_grad=True)
        (x * x).sum().backward()  # a worker may well use autograd itself
        return x.grad, i % 2


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_workers(workers: int) -> None:
    def program() -> Any:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        losses = []
        for x, y in DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, values_of(net)

    same(program)


def test_deep_copies() -> None:
    def program() -> Any:
        net = small_net()
        net(torch.ones(1, 4)).sum().backward()
        twin = copy.deepcopy(net)
        before = grads_of(twin)
        twin(torch.ones(1, 4)).sum().backward()
        x = copy.deepcopy(leaf())
        return before, grads_of(twin), grads_of(net), x, x.requires_grad, x.is_leaf

    same(program)


def test_a_deep_copy_of_a_computed_tensor_is_an_error() -> None:
    for context in (torch.enable_grad(), sg.record()):
        with context, pytest.raises(RuntimeError):
            copy.deepcopy(leaf() * 2)


def test_a_shallow_copy() -> None:
    def program() -> Any:
        x = leaf()
        y = copy.copy(x * 2)
        return y, y.requires_grad, y.is_leaf

    same(program)


def test_saving_and_loading() -> None:
    def through(save: Any, load: Any, thing: Any) -> Any:
        buffer = io.BytesIO()
        save(thing, buffer)
        buffer.seek(0)
        return load(buffer)

    def program() -> Any:
        x = leaf()
        y = x * 2
        found = []
        for t in (x, y, y.detach(), nn.Parameter(y)):
            for again in (through(torch.save, torch.load, t), pickle.loads(pickle.dumps(t))):
                found.append((again, again.requires_grad, again.is_leaf, again.grad_fn))
        y.sum().backward()
        return found, x.grad

    same(program)


def test_saving_and_loading_a_module_and_an_optimizer() -> None:
    def program() -> Any:
        net = small_net()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        buffer = io.BytesIO()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        twin = pickle.loads(pickle.dumps(net))
        twin.load_state_dict(loaded["net"])
        other = torch.optim.Adam(twin.parameters(), lr=0.01)
        other.load_state_dict(loaded["optimizer"])
        twin(torch.ones(1, 4)).sum().backward()
        other.step()
        return values_of(twin), values_of(net)

    same(program)


# -- vmap above


def test_vmap_over_recorded_code() -> None:
    def program() -> Any:
        x = leaf()
        torch.vmap(lambda t: t * x)(torch.ones(3, 2)).sum().backward()
        return x.grad, torch.vmap(lambda t: t.sin())(x.detach())

    same(program)

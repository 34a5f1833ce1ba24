"""S18: after its backward nothing saved is alive; a graph that is dropped frees what it held."""

from __future__ import annotations

import gc
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

import stowgrad as sg
from tests.helpers import Recording, without_rule
from tests.spec.columns import columns, eager, program

pytestmark = pytest.mark.usefixtures("recorded")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What is freed here is freed by counting references, at once."""
    gc.disable()
    yield
    gc.enable()


class TempFile:
    """A packed value that owns a file, which goes with it."""

    def __init__(self, tensor: Tensor, folder: Path) -> None:
        handle, self.path = tempfile.mkstemp(dir=folder)
        os.close(handle)
        torch.save(tensor, self.path)
        weakref.finalize(self, os.unlink, self.path)


class ToFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pack(self, tensor: Tensor) -> TempFile:
        return TempFile(tensor, self.folder)

    def unpack(self, packed: TempFile) -> Tensor:
        return torch.load(packed.path)

    @property
    def files(self) -> int:
        return len(list(self.folder.iterdir()))

    @property
    def hooks(self) -> Any:
        return sg.saved_tensors_hooks(self.pack, self.unpack)


@pytest.fixture
def disk(tmp_path: Path) -> ToFiles:
    return ToFiles(tmp_path)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3,)), dtype=torch.float64, requires_grad=True)


class Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]


def in_place(t: Tensor) -> Tensor:
    y = t * 1
    return y.mul_(t)


def fallen_back(t: Tensor) -> Tensor:
    with without_rule(torch.ops.aten.atan.default):
        return t.atan()


def many(t: Tensor) -> Tensor:
    return torch.cat([t, t.sin()]).softmax(0)


KINDS = pytest.mark.parametrize(
    "op", [torch.sin, torch.square, Save.apply, in_place, fallen_back, many]
)


@columns(eager, program)
@KINDS
def test_s18_after_backward_nothing_saved_is_alive(run: Any, op: Any) -> None:
    x = leaf()
    mid = x * 2
    storage = StorageWeakRef(mid.untyped_storage())
    loss = op(mid).sum()
    del mid
    assert not storage.expired(), "it was saved"
    run(loss)
    assert storage.expired()
    assert loss.grad_fn is not None, "though the graph itself is"


@columns(eager, program)
@KINDS
def test_s18_with_retain_graph_it_stays_alive(run: Any, op: Any) -> None:
    x = leaf()
    mid = x * 2
    storage = StorageWeakRef(mid.untyped_storage())
    loss = op(mid).sum()
    del mid
    run(loss, retain_graph=True)
    assert not storage.expired()
    run(loss)
    assert storage.expired()


@columns(eager, program)
@KINDS
def test_s18_a_graph_that_is_dropped_frees_what_it_saved(run: Any, op: Any) -> None:
    x = leaf()
    mid = x * 2
    storage = StorageWeakRef(mid.untyped_storage())
    loss = op(mid).sum()
    del mid, loss
    assert storage.expired(), "no circle of references keeps it"


@columns(eager, program)
@KINDS
def test_s18_a_second_backward_is_the_references_error(run: Any, op: Any) -> None:
    x = leaf()
    loss = op(x * 2).sum()
    run(loss)
    before = x.grad.clone()
    with pytest.raises(
        sg.GraphFreedError, match=r"(?s)backward.* a second time.*retain_graph=True"
    ) as error:
        run(loss)
    assert isinstance(error.value, RuntimeError)
    assert_close(x.grad, before)


@columns(eager, program)
def test_s18_a_second_backward_through_what_saves_nothing_works(run: Any) -> None:
    """As with PyTorch: there is nothing that could be gone."""
    x = leaf()
    loss = (x + 1).sum()
    run(loss)
    run(loss)
    assert_close(x.grad, torch.full_like(x, 2))


@columns(eager, program)
@KINDS
def test_s18_after_backward_the_files_are_gone(run: Any, op: Any, disk: ToFiles) -> None:
    x = leaf()
    with disk.hooks:
        loss = op(x * 2).sum()
    assert disk.files > 0
    run(loss)
    assert disk.files == 0


@columns(eager, program)
@KINDS
def test_s18_a_dropped_graph_takes_its_files_with_it(run: Any, op: Any, disk: ToFiles) -> None:
    x = leaf()
    with disk.hooks:
        loss = op(x * 2).sum()
    assert disk.files > 0
    del loss
    assert disk.files == 0


def test_s18_a_dropped_graph_of_gradients_takes_its_files_with_it(disk: ToFiles) -> None:
    x = leaf()
    with disk.hooks:
        (g,) = torch.autograd.grad(x.exp().sin().sum(), x, create_graph=True)
    assert disk.files > 0
    del g
    gc.collect()  # a double backward may hold itself by a circle, as PyTorch's does
    assert disk.files == 0


def test_s18_hooks_on_one_tensor_free_its_file(disk: ToFiles) -> None:
    y = leaf().sin()
    y.grad_fn._raw_saved_self.register_hooks(disk.pack, disk.unpack)
    assert disk.files == 1
    y.grad_fn._raw_saved_self.remove_hooks()
    assert disk.files == 0
    y.grad_fn._raw_saved_self.register_hooks(disk.pack, disk.unpack)
    del y
    assert disk.files == 0


def failing_at(disk: ToFiles, call: int, part: str) -> Any:
    """Hooks of `disk`'s that raise at the call-th use of one of them."""
    counts = {"pack": 0, "unpack": 0}

    def counted(name: str, fn: Any) -> Any:
        def wrapped(value: Any) -> Any:
            counts[name] += 1
            if name == part and counts[name] == call:
                raise OSError("no space left on device")
            return fn(value)

        return wrapped

    return sg.saved_tensors_hooks(counted("pack", disk.pack), counted("unpack", disk.unpack))


@columns(eager, program)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_s18_a_pack_that_raises_halfway_frees_what_was_held(
    run: Any, call: int, disk: ToFiles
) -> None:
    x = leaf()

    def forward() -> None:
        with failing_at(disk, call, "pack"):
            (x * x).exp().sin()

    try:
        forward()
    except OSError as error:
        assert "no space left" in str(error)
        error.__traceback__ = None
    else:
        pytest.fail("it raises")
    assert disk.files == 0
    run((x * x).sum())  # and nothing is broken
    assert_close(x.grad, 2 * x.detach())


@columns(eager, program)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_s18_an_unpack_that_raises_halfway_frees_what_was_held(
    run: Any, call: int, disk: ToFiles
) -> None:
    x = leaf()

    def step() -> None:
        with failing_at(disk, call, "unpack"):
            loss = (x * x).exp().sin().sum()
        run(loss)

    try:
        step()
    except OSError as error:
        error.__traceback__ = None
    else:
        pytest.fail("it raises")
    assert disk.files == 0


@columns(eager, program)
def test_s18_a_backward_that_failed_can_be_dropped_or_tried_again(run: Any, disk: ToFiles) -> None:
    """What had not been released yet is still there; what had is gone."""
    x = leaf()
    with failing_at(disk, 1, "unpack"):
        loss = x.sin().sum()
    with pytest.raises(OSError):
        run(loss)
    assert disk.files == 1
    run(loss)
    assert_close(x.grad, x.detach().cos())
    assert disk.files == 0


@columns(eager, program)
def test_s18_a_packed_value_lives_no_longer_than_its_node(run: Any, disk: ToFiles) -> None:
    """Released one by one as backward goes, not all at the end."""
    x, seen = leaf(), []
    with disk.hooks:
        a = x.sin()
        b = a.sin()
        c = b.sin()
    for t in (c, b, a):
        t.register_hook(lambda g: seen.append(disk.files))
    x.register_hook(lambda g: seen.append(disk.files))
    run(c.sum())
    assert seen == [3, 2, 1, 0]


@columns(eager, program)
def test_s18_an_unpacked_value_is_dropped_after_its_node(run: Any) -> None:
    alive: list[Any] = []

    def unpack(packed: Any) -> Tensor:
        assert all(s.expired() for s in alive), "the ones before are gone"
        result = packed.clone()
        alive.append(StorageWeakRef(result.untyped_storage()))
        return result

    x = leaf()
    with sg.saved_tensors_hooks(lambda t: t.clone(), unpack):
        loss = x.sin().sin().sin().sum()
    run(loss)
    assert len(alive) == 3


@columns(eager, program)
def test_s18_the_state_of_a_saved_tensor_tells(run: Any) -> None:
    pair = Recording()
    with sg.saved_tensors_hooks(pair.pack, pair.unpack):
        y = leaf().sin()
    saved = y.grad_fn._raw_saved_self
    run(y.sum())
    assert saved.state == "released"
    assert "released" in repr(saved)

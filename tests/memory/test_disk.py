"""ToDisk: what goes to disk, that it comes back as it was, and that it does not stay there."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import stowgrad as sg
from stowgrad.errors import SavedTensorChanged, StowError
from stowgrad.memory.disk import Extents, ToDisk


@pytest.fixture
def disk(tmp_path):
    return ToDisk(tmp_path)


def stowed(pair):
    return sg.saved_tensors_hooks(pair.pack, pair.unpack)


def directories(path):
    return [name for name in os.listdir(path) if name.startswith("stowgrad-")]


def gradients(fn, tensors, pair=None):
    """The gradients of `fn(*tensors)`: by PyTorch, or by stowgrad with what is saved in `pair`."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    if pair is None:
        fn(*leaves).sum().backward()
    else:
        with sg.record(), stowed(pair):
            fn(*leaves).sum().backward()
    return [leaf.grad for leaf in leaves]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(48, 96)
        self.norm = nn.LayerNorm(96)
        self.qkv = nn.Linear(96, 3 * 96)
        self.out = nn.Linear(96, 48)

    def forward(self, x):
        h = self.norm(torch.nn.functional.gelu(self.inside(x)))
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, 24)).permute(2, 0, 3, 1, 4).unbind(0)
        a = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(a.transpose(1, 2).flatten(2) + h)


@pytest.mark.parametrize("smallest", [0, 4096])
def test_gradients_are_pytorchs_to_the_bit(disk, smallest):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 32, 48)
    disk.smallest = smallest
    net(x).square().mean().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with sg.record(), stowed(disk):
        loss = net(x).square().mean()
        assert disk.packs > 5 and disk.bytes_now > 300_000
        loss.backward()
    for p, g in zip(net.parameters(), expected, strict=True):
        assert torch.equal(p.grad, g)
    assert disk.bytes_now == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(64, 32),
        lambda: torch.randn(64, 32).t(),
        lambda: torch.randn(40, 40)[3:30:2, 5:35:3],
        lambda: torch.randn(7, 1, 200).expand(7, 5, 200),
        lambda: torch.randn(2, 8, 9, 10).contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(600, 40)[:, 7],  # elements far apart
        lambda: torch.randn(600, 40)[100:120],  # a small part of its storage
        lambda: torch.arange(999).to(torch.int8)[1:],
        lambda: torch.randn(999, dtype=torch.bfloat16)[1:],
        lambda: torch.randn(999) > 0,
        lambda: torch.randn(33, 20, dtype=torch.complex64),
        lambda: torch.randn(33, 20, dtype=torch.complex64).conj(),
        lambda: torch.randn(33, 20, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(600, 40, dtype=torch.complex64).conj()[:, 7],
        lambda: torch.randn(10, 20).view(torch.int32),
        lambda: torch.randn(()),
        lambda: torch.randn(0, 5),
    ],
)
def test_any_strided_tensor_comes_back_with_its_strides(disk, make):
    disk.smallest = 0
    torch.manual_seed(0)
    tensor = make()
    packed = disk.pack(INFO, tensor)
    back = disk.unpack(packed)
    if tensor.numel():
        assert packed is not tensor and back.data_ptr() != tensor.data_ptr()
    assert torch.equal(back, tensor)
    assert (back.dtype, back.stride()) == (tensor.dtype, tensor.stride())
    assert (back.is_conj(), back.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert back._base is None


INFO = sg.SavedInfo(
    op="aten.mul", name="self", shape=torch.Size(), dtype=torch.float32,
    device=torch.device("cpu"), nbytes=0, state="packed", is_output=False, is_leaf=False,
    view_of=None, storage=None, where="train.py:7",
)  # fmt: skip


def test_bytes_on_disk_are_those_of_the_tensor(disk):
    x = torch.randn(50, 60)
    packed = disk.pack(INFO, x)
    assert disk.bytes_now == disk.file.stat().st_size == x.nbytes
    rows = disk.pack(INFO, torch.randn(1000, 60)[:50])
    assert disk.bytes_now == disk.file.stat().st_size == 2 * x.nbytes
    column = disk.pack(INFO, torch.randn(3000, 60)[:, 0])
    assert disk.bytes_now == disk.file.stat().st_size == 3 * x.nbytes
    del packed, rows, column


# -- aliases


def test_one_storage_is_packed_once_whatever_views_and_nodes_save_it(disk):
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)

    def fn(x):
        h = x.exp()  # saves h
        a = h.sin() + h.cos() + h.view(-1).sin().view(64, 64)
        q, k = h.chunk(2)
        return a + h @ h.t() + (q * k).sum()

    assert_close(gradients(fn, [x], disk), gradients(fn, [x]), rtol=0, atol=0)
    with sg.record(), stowed(disk):
        before = disk.bytes_total
        h = x.exp()
        kept = [h.sin(), h.view(-1).cos(), h.t() * 2, h @ h.t(), h[:32] * h[32:]]
        assert disk.bytes_total - before == h.nbytes
    del kept


def test_the_transpose_of_a_square_matrix_comes_back_as_the_transpose(disk):
    x = torch.arange(4096.0).view(64, 64)
    first, second = disk.pack(INFO, x), disk.pack(INFO, x.t())
    assert disk.bytes_now == x.nbytes
    assert torch.equal(disk.unpack(first), x)
    assert torch.equal(disk.unpack(second), x.t())
    assert disk.unpack(second).stride() == (1, 64)


def test_a_new_tensor_at_an_old_address_is_not_taken_for_the_old_one(disk):
    addresses, packed = set(), []
    for i in range(5000):
        x = torch.full((1024,), float(i))
        addresses.add((x.data_ptr(), x.untyped_storage()._cdata))
        packed.append(disk.pack(INFO, x))
        del x
        if i >= 50 and len(addresses) < len(packed):
            break
    assert len(addresses) < len(packed)  # or the test says nothing
    for i, p in enumerate(packed):
        assert torch.equal(disk.unpack(p), torch.full((1024,), float(i)))


def test_a_storage_changed_in_place_is_packed_again(disk):
    x = torch.zeros(1024)
    first = disk.pack(INFO, x)
    x[5:].add_(1)
    second = disk.pack(INFO, x)
    assert disk.unpack(first).sum() == 0 and disk.unpack(second).sum() == 1019
    third = disk.pack(INFO, x.data)  # at version 0 of a counter of its own
    assert disk.unpack(third).sum() == 1019


def test_aliases_come_back_as_aliases_and_a_change_is_noticed(disk):
    x = torch.randn(64, 64)
    whole, flipped = disk.pack(INFO, x), disk.pack(INFO, x.t())
    a, b = disk.unpack(whole), disk.unpack(flipped)
    assert a.untyped_storage() is b.untyped_storage()
    b.zero_()  # a careless consumer
    assert torch.equal(disk.unpack(whole), x)
    del a, b
    assert torch.equal(disk.unpack(flipped), x.t())


def test_a_copy_does_not_mind_that_its_tensor_was_changed(disk):
    x = torch.randn(1024, requires_grad=True)
    with sg.record(), stowed(disk):
        h = x * 1
        y = h.sin()
        h.zero_()
        y.sum().backward()
        assert torch.equal(x.grad, x.detach().cos())
        disk.smallest = 1 << 20  # now it stays, and is checked
        h = x * 1
        y = h.sin()
        h.zero_()
        with pytest.raises(SavedTensorChanged):
            y.sum().backward()


# -- what stays


def test_parameters_stay_by_storage_and_small_tensors_by_size(disk):
    weight, frozen = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64), False)
    leaf = torch.randn(64, 64, requires_grad=True)
    small, large = torch.randn(1023), torch.randn(1024)
    left = [weight, weight.t(), weight.detach()[3:], frozen, frozen.t(), leaf, leaf[1:], small]
    for tensor in left:
        assert disk.pack(INFO, tensor) is tensor
    assert disk.packs == 0 and disk.file is None
    assert disk.stayed == {"in use": 7, "small": 1}
    assert disk.pack(INFO, large) is not large


def test_linear_saves_no_parameter_to_disk(disk):
    x, weight = torch.randn(8, 256, requires_grad=True), nn.Parameter(torch.randn(64, 256))
    with sg.record(), stowed(disk):
        y = (x * 2) @ weight.t()
        z = nn.functional.linear(x * 2, weight)
        assert disk.bytes_now == 2 * x.nbytes
        (y + z).sum().backward()


def test_modules_and_tensors_given_to_leave_stay(tmp_path):
    norm, batch = nn.BatchNorm1d(2048), torch.randn(4, 2048)
    disk = ToDisk(tmp_path, leave=[norm, batch])
    for tensor in (norm.running_mean, norm.running_var.view(2, -1), batch, batch.t()):
        assert disk.pack(INFO, tensor) is tensor
    assert disk.pack(INFO, batch.clone()) is not batch


def test_what_has_no_bytes_of_its_own_stays(disk):
    class Mine(torch.Tensor):
        pass

    sparse = torch.eye(100).to_sparse()
    meta = torch.empty(10_000, device="meta")
    mine = torch.randn(10_000).as_subclass(Mine)
    for tensor in (sparse, meta, mine):
        assert disk.pack(INFO, tensor) is tensor
    seen = []
    torch.vmap(lambda t: seen.append(disk.pack(INFO, t) is t) or t)(torch.randn(3, 10_000))
    assert seen == [True]


# -- letting go


def test_blocks_are_freed_by_backward_by_dropping_and_by_errors(disk):
    x = torch.randn(100, 100, requires_grad=True)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ZeroDivisionError

    with sg.record(), stowed(disk):
        y = x.exp().exp()
        assert disk.bytes_now == disk.file.stat().st_size == 2 * x.nbytes
        y.sum().backward()
        assert disk.bytes_now == disk.file.stat().st_size == 0
        y = x.exp().exp()
        del y
        assert disk.bytes_now == disk.file.stat().st_size == 0
        y = Fails.apply(x.exp()).exp()
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        del y
        gc.collect()
        assert disk.bytes_now == disk.file.stat().st_size == 0


def test_retain_graph_reads_again(disk):
    x = torch.randn(100, 100, requires_grad=True)
    with sg.record(), stowed(disk):
        y = x.exp().sin().sum()
        (first,) = torch.autograd.grad(y, x, retain_graph=True)
        now = disk.bytes_now
        (second,) = torch.autograd.grad(y, x, create_graph=True)
        assert torch.equal(first, second) and disk.bytes_now > now > 0
        second.sum().backward()
    expected = (x.exp().cos() * x.exp() - x.exp().sin() * x.exp() ** 2).detach()
    assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)
    del y, second
    assert disk.bytes_now == 0


def test_the_file_goes_with_its_owner(tmp_path):
    disk = ToDisk(tmp_path)
    assert directories(tmp_path) == []  # nothing before it is needed
    packed = disk.pack(INFO, torch.randn(2000))
    (name,) = directories(tmp_path)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
    del disk
    gc.collect()
    assert directories(tmp_path) == [name]  # something packed still needs it
    del packed
    gc.collect()
    assert directories(tmp_path) == []


def test_close_removes_the_file_and_later_use_says_so(disk, tmp_path):
    packed = disk.pack(INFO, torch.randn(2000))
    disk.close()
    assert directories(tmp_path) == []
    with pytest.raises(StowError, match=r"'self' of aten.mul at train.py:7 .* has been closed"):
        disk.unpack(packed)
    again = disk.pack(INFO, torch.ones(2000))
    assert disk.unpack(again).sum() == 2000


def test_gaps_are_used_again():
    extents = Extents()
    offsets = [extents.take(n) for n in (10, 20, 30, 40)]
    assert offsets == [0, 10, 30, 60] and extents.end == 100
    extents.give(10, 20)
    extents.give(60, 40)
    assert extents.end == 60
    assert extents.take(15) == 10 and extents.take(5) == 25 and extents.take(1) == 60
    extents.give(0, 10)
    extents.give(25, 5)
    extents.give(10, 15)  # merges with both neighbours
    assert extents.take(30) == 0
    for start, nbytes in ((30, 30), (60, 1), (0, 30)):
        extents.give(start, nbytes)
    assert extents.end == 0 and extents.take(7) == 0


# -- what goes wrong


def test_a_full_disk_keeps_the_tensor_and_warns_once(disk):
    x = torch.randn(300, 300, requires_grad=True)

    def fn(x):
        return x.exp().sin().cos().exp()

    expected = gradients(fn, [x])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))  # room for one of three
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_close(gradients(fn, [x], disk), expected, rtol=0, atol=0)
            assert disk.packs == 2 and disk.stayed["no room"] == 2
            assert_close(gradients(fn, [x], disk), expected, rtol=0, atol=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    messages = [str(w.message) for w in caught if "ToDisk" in str(w.message)]
    assert len(messages) == 1
    assert "aten." in messages[0] and "stays in memory" in messages[0]
    assert disk.bytes_now == disk.file.stat().st_size == 0
    assert_close(gradients(fn, [x], disk), expected, rtol=0, atol=0)
    assert disk.packs == 2 + 2 + 4  # there is room again


def test_a_corrupt_block_is_an_error_that_names_it(disk):
    x = torch.randn(64, 64, requires_grad=True)
    with sg.record(), stowed(disk):
        y = x.exp().sin()
        with open(disk.file, "r+b") as file:
            file.seek(5000)
            byte = file.read(1)
            file.seek(5000)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(StowError) as caught:
            y.sum().backward()
    message = str(caught.value)
    assert str(disk.file) in message and "block 1 " in message and "checksum" in message
    assert "aten." in message and "test_disk.py:" in message
    del y, caught
    gc.collect()
    assert disk.bytes_now == 0


def test_a_file_cut_short_is_an_error(disk):
    packed = disk.pack(INFO, torch.randn(2000))
    os.truncate(disk.file, 3000)
    with pytest.raises(StowError, match=r"ends 5000 bytes too early"):
        disk.unpack(packed)


def test_a_directory_that_is_not_there():
    with pytest.raises(StowError, match="/no/where is not a directory"):
        ToDisk("/no/where")


LIVES = """
import gc, os, signal, sys, torch
from stowgrad.memory.disk import ToDisk, remove_stale
from tests.memory.test_disk import INFO

gc.freeze()  # or each fork spends a second on taking PyTorch down
where = sys.argv[1]
disk = ToDisk(where)
packed = disk.pack(INFO, torch.arange(2000.0))

def names():
    return sorted(n.split("-")[1] for n in os.listdir(where) if n.startswith("stowgrad-"))

def child(work):
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit()  # as any program ends: with the exit handlers
    assert os.waitpid(pid, 0)[1] in (0, signal.SIGKILL)
    return str(pid)

def uses_what_it_inherits():
    global packed
    assert disk.unpack(packed).sum() == 1999000
    mine = disk.pack(INFO, torch.ones(2000))
    assert disk.unpack(mine).sum() == 2000 and len(names()) == 2
    packed = None

def has_its_own():
    global mine
    mine = ToDisk(where).pack(INFO, torch.ones(2000))

def crashes():
    has_its_own()
    os.kill(os.getpid(), signal.SIGKILL)

me = str(os.getpid())
child(uses_what_it_inherits)
assert names() == [me] and os.path.getsize(disk.file) == 8000
child(has_its_own)
assert names() == [me]
dead = child(crashes)
assert names() == sorted([me, dead])
os.mkdir(os.path.join(where, "stowgrad-notes-"))
open(os.path.join(where, "stowgrad-notes-", "text"), "w").close()
ToDisk(where)  # takes away what the dead one left, and not what the living one has
assert names() == [me, "notes"]
assert disk.unpack(packed).sum() == 1999000
"""


def test_nothing_outlives_its_process_for_long(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", LIVES, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert directories(tmp_path) == ["stowgrad-notes-"]


def test_many_threads_share_one_pair(disk):
    torch.manual_seed(0)
    shared = torch.randn(64, 64)
    expected = {}
    errors = []

    def fn(x):
        h = (x @ shared).tanh()
        return (h @ h.t()).sin() * h

    def work(seed):
        try:
            x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
            for _ in range(5):
                (g,) = gradients(fn, [x], disk)
                if not torch.equal(g, expected[seed]):
                    errors.append("a wrong gradient")
        except BaseException as error:
            errors.append(error)

    for seed in range(6):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))
        (expected[seed],) = gradients(fn, [x])
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert disk.bytes_now == disk.file.stat().st_size == 0


def test_compose_with_another_pair(disk):
    half = (lambda t: (t.to(torch.float64), t.dtype), lambda p: p[0].to(p[1]))
    x = torch.randn(100, 100)

    def fn(x):
        return x.exp().sin()

    pair = sg.compose(half, disk)
    assert_close(gradients(fn, [x], pair), gradients(fn, [x]), rtol=0, atol=0)
    assert disk.bytes_peak == 2 * x.nbytes * 2  # both in double

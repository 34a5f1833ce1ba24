"""Saved tensors on disk: blocks with checksums in a file that does not outlive its process.

One file for each pair, in a private directory of its own. New blocks take the first gap that
fits, else the end; gaps merge; a gap at the end is cut off. Backward frees roughly in the reverse
order of forward, so the file shrinks as backward goes, and is empty after a step.

The file's owner holds a lock on it, which the system takes away when the process dies however it
dies. Making a file first removes the directories whose lock is free.

Needs a POSIX system. Where the temporary directory is kept in memory (tmpfs), give another one:
otherwise what is written takes the memory it was to free.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import shutil
import stat
import tempfile
import time
import warnings
import weakref
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import StowError
from .place import SMALLEST, NoRoom, Place

_PREFIX = "stowgrad-"
_NAME = "blocks"
_PIECE = 1 << 30  # bytes a system call; Linux takes at most 2 GiB
_UNLOCKED_AGE = 3600.0  # seconds; younger directories without a file are being made


class Extents:
    """Which bytes of a file are free: sorted gaps, and everything from `end` on."""

    def __init__(self) -> None:
        self.end = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` that were free: in the first gap that fits, else at the end."""
        for i, start in enumerate(self._starts):
            if self._ends[i] - start >= nbytes:
                if self._ends[i] - start == nbytes:
                    del self._starts[i], self._ends[i]
                else:
                    self._starts[i] = start + nbytes
                return start
        start, self.end = self.end, self.end + nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Free these bytes. `end` moves down if they are the last."""
        end = start + nbytes
        i = bisect.bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:  # merge with the next gap
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i > 0 and self._ends[i - 1] == start:  # and with the one before
            start = self._starts[i - 1]
            del self._starts[i - 1], self._ends[i - 1]
            i -= 1
        if end == self.end:
            self.end = start
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)


class BlockFile:
    """The file, its lock and its directory, which go when the object or the process does."""

    def __init__(self, root: Path) -> None:
        self.extents = Extents()
        self.pid = os.getpid()
        self.path, self.fd = _make(root)
        self.remove = weakref.finalize(self, _remove, self.fd, self.path.parent, self.pid)

    def write(self, data: memoryview) -> int:
        """Write a block; return its offset. Raises OSError, and then nothing is taken."""
        before = self.extents.end
        offset = self.extents.take(len(data))
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self.fd, data[done : done + _PIECE], offset + done)
        except OSError:
            self.extents.give(offset, len(data))
            if self.extents.end <= before:
                os.ftruncate(self.fd, self.extents.end)
            raise
        return offset

    def read(self, data: memoryview, offset: int) -> int:
        """Fill `data` from `offset`; return how many bytes there were."""
        done = 0
        while done < len(data):
            got = os.preadv(self.fd, [data[done : done + _PIECE]], offset + done)
            if got == 0:
                break
            done += got
        return done

    def free(self, offset: int, nbytes: int) -> None:
        if os.getpid() != self.pid:  # a fork: the blocks are the parent's
            return
        before = self.extents.end
        self.extents.give(offset, nbytes)
        if self.extents.end < before and self.remove.alive:
            os.ftruncate(self.fd, self.extents.end)


class Block:
    """Where bytes lie in a file, and their checksum."""

    __slots__ = ("crc", "file", "nbytes", "number", "offset")

    def __init__(self, file: BlockFile, number: int, offset: int, nbytes: int, crc: int) -> None:
        self.file = file
        self.number = number
        self.offset = offset
        self.nbytes = nbytes
        self.crc = crc

    def __repr__(self) -> str:
        end = self.offset + self.nbytes
        return f"block {self.number} (bytes {self.offset} to {end}) of {self.file.path}"


class ToDisk(Place):
    """Pack: write the tensor to a block of a file. Unpack: read it back, checked.

    Bytes on disk are those of the storage that the tensor lives in, once; dtype, shape, strides
    and device come back as they were. A block is free again when nothing packed refers to it; the
    file goes with this object, at exit, or, after a crash, when the next one is made.

    `directory`: where to make the private directory (default: the system's temporary one).
    A write that fails (a full disk) leaves that tensor in memory, with one warning.
    Raises StowError if a block cannot be read or its checksum does not match: names the block, the
    file, and the op that saved it.
    """

    place = "disk"

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        smallest: int = SMALLEST,
        leave: Iterable[nn.Module | Tensor] = (),
    ) -> None:
        super().__init__(smallest=smallest, leave=leave)
        self.root = Path(directory if directory is not None else tempfile.gettempdir())
        if not self.root.is_dir():
            raise StowError(f"ToDisk: {self.root} is not a directory")
        if not hasattr(os, "pwrite"):
            raise StowError("ToDisk needs a POSIX system (os.pwrite)")
        remove_stale(self.root)
        self._file: BlockFile | None = None
        self._blocks = 0
        self._warned = False

    @property
    def file(self) -> Path | None:
        """The file that blocks go to; None before the first one."""
        return self._file.path if self._file is not None else None

    def close(self) -> None:
        """Remove the file now. Unpacking what was packed raises StowError from here on."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.remove()

    def _store(self, flat: Tensor, dtype: torch.dtype, label: str) -> Block:
        host = flat.cpu()
        data = _memory(host)
        try:
            file = self._file
            if file is None or file.pid != os.getpid():  # first use, here or after a fork
                file = self._file = BlockFile(self.root)
            offset = file.write(data)
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"ToDisk: writing {label} ({len(data)} bytes) to {self.root} failed "
                    f"({error}); what cannot be written stays in memory. Free some space, or give "
                    "another directory.",
                    stacklevel=2,
                )
            raise NoRoom from None
        self._blocks += 1
        return Block(file, self._blocks, offset, len(data), zlib.crc32(data))

    def _load(self, handle: Any, nbytes: int, device: torch.device, label: str) -> Tensor:
        host = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        data = _memory(host)
        if not handle.file.remove.alive:
            raise StowError(f"{label} was in {handle}, which has been closed")
        try:
            got = handle.file.read(data, handle.offset)
        except OSError as error:
            raise StowError(f"{label} cannot be read back from {handle}: {error}") from error
        if got < nbytes:
            raise StowError(
                f"{label} cannot be read back from {handle}: the file ends {nbytes - got} bytes "
                "too early"
            )
        if zlib.crc32(data) != handle.crc:
            raise StowError(
                f"{label} cannot be read back from {handle}: its checksum does not match, so the "
                "file was changed or the disk is failing"
            )
        return host.to(device)

    def _free(self, handle: Any) -> int:
        handle.file.free(handle.offset, handle.nbytes)
        nbytes: int = handle.nbytes
        return nbytes


def remove_stale(root: Path) -> None:
    """Remove what dead processes left in `root`: our directories whose file nobody has locked."""
    try:
        names = [n for n in os.listdir(root) if n.startswith(_PREFIX)]
    except OSError:
        return
    for name in names:
        folder = root / name
        try:
            if _is_stale(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # someone else's, or gone meanwhile
            continue


def _is_stale(folder: Path) -> bool:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    try:
        fd = os.open(folder / _NAME, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return not os.listdir(folder) and time.time() - found.st_mtime > _UNLOCKED_AGE
    try:
        return _lock(fd)
    finally:
        os.close(fd)


def _make(root: Path) -> tuple[Path, int]:
    """A new private directory with an empty, locked file in it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        path = folder / _NAME
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Between the two calls another process may have taken it for a stale one.
        if _lock(fd) and path.exists():
            return path, fd
        os.close(fd)
        shutil.rmtree(folder, ignore_errors=True)


def _lock(fd: int) -> bool:
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(fd: int, folder: Path, pid: int) -> None:
    os.close(fd)
    if os.getpid() == pid:  # not in a fork, which exits with a copy of this finalizer
        shutil.rmtree(folder, ignore_errors=True)


def _memory(flat: Tensor) -> memoryview:
    """The bytes of a CPU tensor of uint8, without NumPy. Valid while `flat` lives."""
    array = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    return memoryview(array).cast("B")

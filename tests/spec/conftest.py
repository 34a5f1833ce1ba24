"""Every test of the table ends with the thread as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import stowgrad as sg
from tests.helpers import leaves_nothing_behind


@pytest.fixture(autouse=True)
def clean_thread() -> Iterator[None]:
    sg.program_cache.clear()
    with leaves_nothing_behind():
        yield


@pytest.fixture
def recorded() -> Iterator[None]:
    """The whole test is inside `record()`."""
    with sg.record():
        yield

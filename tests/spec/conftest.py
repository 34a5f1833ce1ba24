"""Every test of the table ends with the thread as it found it. A test that does not take `run`
(see columns.py) is run in both columns as it stands, its backwards captured in the second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import stowgrad as sg
from tests.helpers import leaves_nothing_behind
from tests.spec.columns import no_fallback

# Rows whose every test says by itself how its backwards run, or that have no second column.
ONE_COLUMN = ("test_reference", "test_s08", "test_s09", "test_s11", "test_s12", "test_s13")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if "run" not in metafunc.fixturenames and not name.startswith(ONE_COLUMN):
        metafunc.parametrize("column", ["eager", "program"], indirect=True)


@pytest.fixture(autouse=True)
def column(request: Any) -> Iterator[None]:
    sg.program_cache.clear()
    if getattr(request, "param", "eager") == "eager":
        yield
        return
    with sg.compiled_backward():
        yield
    no_fallback()


@pytest.fixture(autouse=True)
def clean_thread(column: None) -> Iterator[None]:
    with leaves_nothing_behind():
        yield


@pytest.fixture
def recorded() -> Iterator[None]:
    """The whole test is inside `record()`."""
    with sg.record():
        yield

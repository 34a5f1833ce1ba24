"""Random programs whose every saved tensor goes through hooks: right or an error, and no leak."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import stowgrad as sg
from stowgrad.errors import SavedTensorChanged
from stowgrad.graph import Node
from stowgrad.saved import SavedTensor
from tests.random_programs import Program, compare_packed, draft, never, reduced, run

profile = settings(
    database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def copied(program: Program) -> str:
    """Copies are not changed by what happens to the tensor: no error, and right."""
    return compare_packed(program, "clone", never)


def aliased(program: Program) -> str:
    """An alias that was changed is an error (SPEC S17), never a wrong gradient."""
    return compare_packed(program, "detach", lambda error: isinstance(error, SavedTensorChanged))


def left_over(program: Program) -> str:
    """What of the program's graph is alive once its variables are gone. Of no account where
    PyTorch does not free it either: a tensor that is saved and then changed in place keeps the
    node of the change alive, and so itself; a gradient with a graph keeps its leaf."""
    if not all(memory.expired() for memory in run(program).memory):
        return ""
    gc.collect()
    gc.freeze()
    try:
        with sg.record():
            run(program)
        gc.collect()
        left = [o for o in gc.get_objects() if isinstance(o, (Node, SavedTensor))]
        return f"leak: {left}" if left else ""
    finally:
        gc.unfreeze()


def check(number: int, fails: Callable[[Program], str]) -> None:
    program = draft(random.Random(number), hooks=fails is left_over)
    if fails(program):
        program, found = reduced(program, fails)
        pytest.fail(f"{found}\n\n{program.source()}\n", pytrace=False)


KINDS = pytest.mark.parametrize("fails", [copied, aliased, left_over])


@KINDS
@settings(profile, max_examples=60, derandomize=True)
@given(number=st.integers(0, 2**32))
def test_a_random_program(fails: Callable[[Program], str], number: int) -> None:
    check(number, fails)


@pytest.mark.slow
@KINDS
@seed(5000)
@settings(profile, max_examples=500)
@given(number=st.integers(0, 2**32))
def test_many_random_programs(fails: Callable[[Program], str], number: int) -> None:
    check(number, fails)

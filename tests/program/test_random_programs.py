"""Random programs give within compiled_backward() what they give under PyTorch's autograd, when
their backwards are captured and when they are found again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import stowgrad as sg
from tests.random_programs import Program, compare, draft, reduced
from tests.test_random_programs import profile


def compare_captured(program: Program) -> str:
    sg.program_cache.clear()
    with sg.compiled_backward():
        found = compare(program) or compare(program)
    reasons = set(sg.program_cache.fallbacks) - {"its graph was freed"}
    return found or (f"a fall-back: {reasons}" if reasons else "")


def check(number: int) -> None:
    program = draft(random.Random(number))
    if compare_captured(program):
        program, found = reduced(program, compare_captured)
        pytest.fail(f"{found}\n\n{program.source()}\n", pytrace=False)


@settings(profile, max_examples=60, derandomize=True)
@given(st.integers(0, 2**32))
def test_a_random_program_gives_what_it_gives_under_pytorch(number: int) -> None:
    check(number)


@pytest.mark.slow
@seed(7000)
@settings(profile, max_examples=1500)
@given(st.integers(0, 2**32))
def test_many_random_programs_give_what_they_give_under_pytorch(number: int) -> None:
    check(number)

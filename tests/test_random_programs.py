"""Random programs give under record() what they give under PyTorch's autograd.

What is compared: which steps raise; the values, gradients, retained gradients, versions and flags
of every variable; what hooks saw, in which order.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.random_programs import compare, draft, reduced

# Programs are cut down by their own means (`reduced`), step by step.
profile = settings(
    database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def check(rng: random.Random) -> None:
    program = draft(rng)
    if compare(program):
        program, found = reduced(program, compare)
        pytest.fail(f"{found}\n\n{program.source()}\n", pytrace=False)


@settings(profile, max_examples=200, derandomize=True)
@given(st.integers(0, 2**32))
def test_a_random_program_gives_what_it_gives_under_pytorch(number: int) -> None:
    check(random.Random(number))


@pytest.mark.slow
@seed(5000)
@settings(profile, max_examples=5000)
@given(st.integers(0, 2**32))
def test_many_random_programs_give_what_they_give_under_pytorch(number: int) -> None:
    check(random.Random(number))

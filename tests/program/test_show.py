"""Programs as text and as pictures."""

from __future__ import annotations

import builtins
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowgrad as sg
from stowgrad.saved import saved_tensors_hooks


def captured(loss: Any, **options: Any) -> sg.Program:
    with sg.record():
        return sg.capture(loss(), **options)


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape).requires_grad_()


def line_of(text: str, part: str) -> str:
    (found,) = [line for line in text.splitlines() if part in line]
    return found


class TestText:
    def test_a_whole_program(self) -> None:
        x = leaf(4, 1)

        def loss() -> Tensor:
            return (x.expand(4, 7).exp() * x).sum()

        text = re.sub(r" +", " ", str(captured(loss)))
        at = f"at test_show.py:{loss.__code__.co_firstlineno + 1}"
        head, inputs, steps = text.split("\n\n")
        assert re.match(rf"backward of aten.sum {at}: \d+ steps\nsizes: .*s\d = 7", head)
        shape = r"float32 \[\w+, \w+\]"
        for line in (
            rf"grad float32 \[\] gradient of aten.sum {at}",
            rf"n\d.self {shape} saved by aten.mul {at}",
            rf"n\d.other {shape} saved by aten.mul {at} = memory of leaf n\d",
            rf"n\d.out {shape} saved by aten.exp {at} = memory of n\d.self",
            rf"n\d {shape} leaf",
        ):
            assert re.search(rf"^ {line}$", inputs, re.M), line
        for line in (
            rf"%0 = aten.expand\(grad, .*\) {shape} free grad # aten.sum {at}",
            rf"check that n\d.other was not changed {shape}.*",
            rf"%\d+ = read n\d.out {shape}.*",
            rf"%\d+ = aten.mul.Tensor\(%0, n\d.other\) {shape} free n\d.other.*",
            r"%\d+ = aten.add.?.Tensor\(.*\).* # sum of gradients",
            r"accumulate %\d+ into n\d.grad free %\d+",
        ):
            assert re.search(rf"^ {line}$", steps, re.M), line

    def test_hooks_and_packed_tensors(self) -> None:
        x, w = leaf(4), leaf(4)
        kept = []
        x.register_hook(lambda g: None)
        w.register_post_accumulate_grad_hook(lambda p: None)

        def loss() -> Tensor:
            with saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
                y = x * w
            y.register_hook(lambda g: g * 2)
            y.retain_grad()
            kept.append(y)
            return y.sum()

        text = str(captured(loss))
        assert "packed by a hook, saved by aten.mul at test_show.py" in text
        assert "leaf, hooks: leaf" in text
        assert "leaf, hooks: post-accumulate" in text
        assert "hooks: tensor, retain" in text
        assert re.search(r"%\d+ = unpack n\d+\.other", text)
        assert re.search(r"%\d+ = call the hooks of output 0 of n\d+ on %\d+", text)
        assert re.search(r"retain %\d+ as the .grad of output 0 of n\d+", text)
        assert re.search(r"%\d+ = call the hooks of n\d+ on %\d+", text)
        assert re.search(r"call the post-accumulate hooks of n\d+", text)
        assert len(re.findall(r"accumulate %\d+ into n\d+\.grad", text)) == 2

    def test_custom_function(self) -> None:
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * 2

        x = leaf(4)
        text = str(captured(lambda: Twice.apply(x).sum()))
        assert "run as it is" in text
        assert re.search(r"%\d+ = call n\d+ on \(%\d+\)", text)

    def test_gradients_of_inputs(self) -> None:
        x, y = leaf(4), leaf(4)
        text = str(captured(lambda: (x * y).sum(), inputs=[x, y]))
        assert re.search(r"\n  return %\d+, %\d+\n$", text)
        assert "accumulate" not in text

    def test_several_results(self) -> None:
        x = leaf(3, 4)
        text = str(captured(lambda: nn.functional.layer_norm(x, (4,), leaf(4), leaf(4)).sum()))
        assert re.search(
            r"native_layer_norm_backward.*  float32 \[\w+, \w+\]; float32 \[\w+\]", text
        )
        assert len(set(re.findall(r"accumulate (%\d+\.[012]) into", text))) == 3

    def test_what_is_named_is_there(self) -> None:
        """Every value is made before it is used, and freed once, at its last use."""
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        text = str(captured(lambda: net(torch.rand(2, 3, 8, 8)).square().mean()))
        body = text.partition("steps:\n")[2]
        made: set[str] = set()
        gone: set[str] = set()
        for line in body.splitlines():
            code = line.partition("#")[0]
            code, _, freed = code.partition(" free ")
            head, equals, rest = code.partition(" = ")
            used = set(re.findall(r"%\d+", rest if equals else code))
            assert used <= made
            assert not set(re.findall(r"%\d+(?![.\d])", code)) & gone
            if equals:
                made.add(head.strip())
            names = {n.strip() for n in freed.split(",") if n.strip()}
            assert not names & gone
            gone |= names
        assert {n.split(".")[0] for n in gone if n.startswith("%")} == made

    def test_many_steps_stay_readable(self) -> None:
        x = leaf(8)

        def loss() -> Tensor:
            y = x
            for _ in range(300):
                y = y.sin()
            return y.sum()

        lines = str(captured(loss)).splitlines()
        assert len(lines) > 900
        assert max(map(len, lines)) < 160


class TestPlot:
    @pytest.fixture
    def program(self) -> sg.Program:
        x, v, w = torch.rand(16, 64), leaf(64, 64), leaf(64, 64)

        def loss() -> Tensor:
            y = (x @ v).relu()
            with saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
                return (y @ w).sin().sum()

        return captured(loss)

    def test_labels(self, program: sg.Program, tmp_path: Path) -> None:
        path = tmp_path / "backward.svg"
        program.plot(path)
        root = ElementTree.parse(path).getroot()
        words = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]
        assert "leaves" in words
        assert "accumulated .grad" in words
        assert "saved" in words
        assert "unpacked" in words
        assert "gradients and temporaries" in words
        assert "unpack (3)" in words
        assert "alive, KiB" in words
        assert any(
            w.startswith("Live bytes in the backward of aten.sum at test_show") for w in words
        )
        assert any(re.fullmatch(r"peak \d+\.\d KiB", w) for w in words)
        assert any(re.fullmatch(r"step \d+: aten\..*", w) for w in words)
        assert any(
            w.startswith(("in the backward of aten.", "after the backward of aten.")) for w in words
        )
        assert any(re.fullmatch(r"test_show\.py:\d+", w) for w in words)

    def test_png_and_other_sizes(self, program: sg.Program, tmp_path: Path) -> None:
        small, large = tmp_path / "small.png", tmp_path / "large.png"
        rows = next(name for name, value in program.symbols.items() if value == 16)
        program.plot(small)
        program.plot(str(large), sizes={rows: 1600})
        assert small.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert small.read_bytes() != large.read_bytes()

    def test_without_matplotlib(
        self, program: sg.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = builtins.__import__

        def missing(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.partition(".")[0] == "matplotlib":
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", missing)
        with pytest.raises(sg.StowgradError, match=r"pip install 'stowgrad\[plot\]'"):
            program.plot(tmp_path / "backward.svg")

    def test_a_program_of_few_steps(self, tmp_path: Path) -> None:
        x = leaf(4)
        path = tmp_path / "tiny.svg"
        captured(lambda: x.sum()).plot(path)
        assert "peak" in path.read_text()

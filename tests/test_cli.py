"""The command `stowgrad`: it runs a script as `python` would, and says what happened.

Importing PyTorch takes seconds, so one process imports it and forks for each command; the fork
ends as a process of its own, with the interpreter's real exit code or signal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

FORKER = """
import gc, json, os, sys, tempfile
import torch
import stowgrad.cli, stowgrad.record
torch.optim.SGD([torch.zeros(1)], 0.1)  # imports much
stowgrad.cli.how_recorded()
gc.collect()
gc.freeze()  # or each fork spends a second on taking PyTorch down
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.chdir(job["cwd"])
        for name, target in (("out", 1), ("err", 2)):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        tempfile.tempdir = job["tmp"]
        torch.set_num_threads(1)
        sys.argv = ["stowgrad", *job["argv"]]
        break
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
else:
    os._exit(0)
stowgrad.cli.main()
"""


@dataclass
class Result:
    code: int  # as subprocess.returncode: negative for a signal
    out: str
    err: str
    left: list[str]  # our directories in the temporary one


class Command:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def start(self, *argv: str) -> int:
        """Start a command; return its process id."""
        job = {
            "argv": argv, "cwd": str(self.folder), "tmp": str(self.tmp),
            "out": str(self.folder / "out"), "err": str(self.folder / "err"),
        }  # fmt: skip
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def wait(self) -> Result:
        code = os.waitstatus_to_exitcode(int(self.process.stdout.readline()))
        texts = [(self.folder / name).read_text() for name in ("out", "err")]
        return Result(code, *texts, self.stowed())

    def stowed(self) -> list[str]:
        return [name for name in os.listdir(self.tmp) if name.startswith("stowgrad-")]

    def __call__(self, *argv: str) -> Result:
        self.start(*argv)
        return self.wait()

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return str(path)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    command = Command(tmp_path_factory.mktemp("cli"))
    yield command
    command.process.stdin.close()
    command.process.wait()


TRAIN = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.norm = nn.BatchNorm1d(32)
    def forward(self, x):
        return self.norm(x + self.body(x))
model = nn.Sequential(*[Block() for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 32)
for _ in range(3):
    loss = model(x).square().mean() + model(-x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
digest = sum(t.double().abs().sum() for t in model.state_dict().values())
kind = type(loss.grad_fn)
print(loss.item().hex(), digest.item().hex(), kind.__name__ != "NoneType", kind.__module__)
"""


def test_every_stow_trains_to_the_same_bits_and_reports(command):
    script = command.script(TRAIN)
    native = command("run", "--native", "--json", "native.json", script)
    assert native.code == 0, native.err
    peaks = {}
    for stow in (None, "host", "disk", "recompute"):
        options = ["--stow", stow] if stow else ["--record-only"]
        result = command("run", *options, "--json", "report.json", script)
        assert (result.code, result.left) == (0, []), result.err
        assert result.out.split()[:3] == native.out.split()[:3]
        assert result.out.split()[3].startswith("stowgrad")
        assert "steps seen" in result.err and "calls of backward" in result.err
        report = json.loads((command.folder / "report.json").read_text())
        assert report["backward_calls"] == 3
        assert 0 < report["backward_seconds"] < report["wall_seconds"]
        assert 0 < report["step_seconds"] < report["wall_seconds"]
        assert 0 <= report["saved_bytes"] < report["peak_bytes"]
        assert sum(report["ops_by_rule"].values()) > 50
        assert isinstance(report["ops_by_fallback"], dict)
        peaks[stow] = report
    assert json.loads((command.folder / "native.json").read_text())["backward_calls"] == 3
    assert "in host memory already" in command("run", "--stow", "host", script).err
    assert peaks["disk"]["stowed_bytes"] > 100_000 > peaks["disk"]["saved_bytes"]
    assert peaks[None]["saved_bytes"] > peaks["recompute"]["saved_bytes"]
    assert peaks[None]["peak_bytes"] > peaks["recompute"]["peak_bytes"] > 0
    assert peaks[None]["peak_bytes"] > peaks["disk"]["peak_bytes"]
    assert peaks["recompute"]["blocks"] == 3 and peaks["recompute"]["block_calls"] == 18


def test_the_script_is_the_main_program(command):
    command.script("value = 7", name="beside.py")
    script = command.script(
        """
        import sys, pickle, beside
        class Local: pass
        pickle.loads(pickle.dumps(Local()))
        import stowgrad
        print(__name__, sys.argv, sys.path[0], __file__, beside.value, stowgrad.recording())
        """
    )
    result = command("run", "script.py", "--stow", "x", "-v", "--help", "a b")
    assert result.code == 0, result.err
    arguments = ["script.py", "--stow", "x", "-v", "--help", "a b"]
    assert result.out.strip() == f"__main__ {arguments} {command.folder} {script} 7 True"
    assert Path(script).exists()


@pytest.mark.parametrize(
    "text, code, err",
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('that is all')", 1, "that is all\n"),
        ("raise SystemExit(None)", 0, ""),
        ("def f(:\n  pass", 1, "SyntaxError: invalid syntax\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
    ],
)
def test_exit_codes_are_those_of_python(command, text, code, err):
    script = command.script(text)
    python = subprocess.run([sys.executable, script], capture_output=True, text=True)
    result = command("run", "--stow", "disk", script)
    assert result.code == python.returncode == code
    assert result.err.endswith(err)
    if "SyntaxError" in err:
        assert result.err.endswith(python.stderr)


RAISES = """
import torch
def inner(x):
    return x @ torch.ones(7, 7)
def outer():
    try:
        {}["key"]
    except KeyError as error:
        x = torch.ones(64, 32, requires_grad=True)
        y = (x * 2).exp()
        raise ValueError("bad") from inner(y)
outer()
"""


def test_tracebacks_show_the_script_and_not_us(command):
    script = command.script(RAISES)
    python = subprocess.run([sys.executable, script], capture_output=True, text=True)
    result = command("run", "--stow", "disk", script)
    assert (result.code, result.left) == (1, [])
    assert result.err.endswith(python.stderr)
    full = command("run", "--full-traceback", script)
    assert full.code == 1
    assert f"stowgrad{os.sep}cli.py" in full.err and f"stowgrad{os.sep}record.py" in full.err


def test_a_script_that_is_not_there(command):
    result = command("run", "nowhere.py")
    assert result.code == 2
    assert "can't open file" in result.err and "nowhere.py" in result.err
    assert command("run", str(command.folder)).code == 2


def test_ctrl_c_ends_by_the_signal_and_leaves_nothing(command):
    script = command.script(
        """
        import atexit, pathlib, time, torch
        atexit.register(print, "exit handler")
        x = torch.randn(100, 100, requires_grad=True)
        y = (x.exp() * 2).exp()
        pathlib.Path("ready").touch()
        time.sleep(60)
        """
    )
    pid = command.start("run", "--stow", "disk", "--json", "interrupted.json", script)
    deadline = time.monotonic() + 50
    while not (command.folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert command.stowed()  # something is on disk
    os.kill(pid, signal.SIGINT)
    result = command.wait()
    assert result.code == -signal.SIGINT
    assert result.err.endswith("KeyboardInterrupt\n") and "cli.py" not in result.err
    assert result.out == "exit handler\n"
    assert result.left == []
    report = json.loads((command.folder / "interrupted.json").read_text())
    assert report["stowed_bytes"] == 80_000


def test_hooks_of_the_script_act_as_without_us(command):
    script = command.script(
        """
        import torch
        from torch.autograd.graph import saved_tensors_hooks, disable_saved_tensors_hooks
        x = torch.randn(64, 64, requires_grad=True)
        packed = []
        with disable_saved_tensors_hooks("not here"):
            x.exp()
            try:
                with saved_tensors_hooks(id, id): pass
            except RuntimeError as error:
                print(error)
        with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            y = x.exp()
        y.sum().backward()
        print(len(packed), torch.equal(x.grad, x.exp()))
        try:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        except RuntimeError as error:
            print("no hooks")
        """
    )
    result = command("run", "--stow", "disk", script)
    assert result.code == 0, result.err
    assert result.out == "not here\n1 True\nno hooks\n"


def test_the_report_that_cannot_be_written_is_said(command):
    script = command.script("print('done')")
    result = command("run", "--json", "no/such/folder.json", script)
    assert (result.code, result.out) == (1, "done\n")
    assert "the report could not be written" in result.err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--stow", "attic"], "'attic' is not one of"),
        (["--stow", "disk", "--record-only"], "cannot be combined with --record-only"),
        (["--stow", "host", "--native"], "cannot be combined with --native"),
        (["--stow-dir", "."], "needs --stow disk"),
        (["--stow", "disk", "--stow-dir", "nowhere"], "nowhere is not a directory"),
    ],
)
def test_options_that_make_no_sense(command, options, message):
    result = command("run", *options, command.script("print('ran')"))
    words = " ".join(result.err.replace("│", " ").split())
    assert (result.code, result.out) == (2, "")
    assert message in words


def test_ops_says_how_each_op_is_recorded(command):
    everything = json.loads(command("ops", "--json").out)
    assert len(everything) > 3000
    assert everything["aten.mm.default"] == "rule"
    assert everything["aten.mm.out"] == "out"
    assert everything["aten.eq.Tensor"] == "constant"
    assert "composite" in everything.values()
    table = command("ops", "aten.mm.*")
    assert table.code == 0 and "aten.mm.default" in table.out
    assert "has a derivative rule of its own" in table.out
    only = json.loads(command("ops", "--how", "composite", "--json").out)
    assert set(only.values()) == {"composite"}
    nothing = command("ops", "no_such_op")
    assert nothing.code == 1 and "no op matches" in nothing.err


def test_version_and_import_cost(command):
    import stowgrad

    assert command("--version").out == f"stowgrad {stowgrad.__version__}\n"
    code = "import sys, stowgrad; print(sorted({'rich', 'typer'} & set(sys.modules)))"
    hidden = "import sys; sys.modules['typer'] = None; import stowgrad.cli"
    first, second = (
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True)
        for c in (code, hidden)
    )
    assert first.stdout == "[]\n", first.stderr
    assert second.returncode == 1
    assert "pip install 'stowgrad[cli]'" in second.stderr and "Traceback" not in second.stderr

"""The command `megatron`, and the wheel that installs it."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron import __main__ as command
from megatron import __version__
from megatron.errors import InputError

ROOT = Path(__file__).resolve().parent.parent


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int | None:
    monkeypatch.setattr(sys, "argv", ["megatron", *words])
    return command.main()


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_usage(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert run(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    longest = max(map(len, command.COMMANDS))
    for name, (_, what) in command.COMMANDS.items():
        assert f"\n  {name.ljust(longest)}  {what}\n" in out


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"megatron {__version__}\n"
    monkeypatch.setattr(command, "version", lambda name: "0.16.1")
    run(monkeypatch, "--version")
    assert "note: megatron-core 0.16.1 is installed too" in capsys.readouterr().out


def test_unknown_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^pretrain is not a command; choose from pretrain-gpt, "):
        run(monkeypatch, "pretrain")


def test_help_of_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        run(monkeypatch, "plan", "--help")
    assert capsys.readouterr().out.startswith("usage: megatron plan [flags]\n")


def test_usage_imports_neither_torch_nor_numpy() -> None:
    code = "import sys; from megatron.__main__ import usage; usage(); print({'torch', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_scripts_and_commands_are_the_same_code() -> None:
    """Each command has a script in the checkout, which does nothing but call it."""
    modules = [module for module, _ in command.COMMANDS.values()]
    files = (ROOT / "megatron" / "commands").glob("[a-z]*.py")
    assert sorted(path.stem for path in files if "run_command(main)" in path.read_text()) == sorted(
        module.rpartition(".")[2] for module in modules if ".commands." in module
    )
    for module in modules:
        name = module.rpartition(".")[2]
        script = next(path for path in (ROOT / f"{name}.py", ROOT / "tools" / f"{name}.py") if path.exists())
        assert f'run_command("{module}")\n' in script.read_text()
        assert callable(importlib.import_module(module).main)


INTERRUPT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("name", command.COMMANDS)
def test_ctrl_c_during_imports(name: str, tmp_path: Path) -> None:
    """A script, which is interrupted when it imports its command, ends with one line, as `megatron` does."""
    module, _ = command.COMMANDS[name]
    script = f"{module.rpartition('.')[2]}.py"
    starts = [[script if (ROOT / script).exists() else f"tools/{script}"]]
    if name == "serve":  # the others take the same way
        starts.append(["-m", "megatron", name])
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "INTERRUPTED": module}
    for start in starts:
        words = [sys.executable, *start, "--help"]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.slow
def test_the_wheel_trains_outside_the_checkout(tmp_path: Path) -> None:
    """Two processes of torchrun find nothing but the installed wheel."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    source = tmp_path / "source"  # a build leaves files in its folder
    shutil.copytree(ROOT / "megatron", source / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    subprocess.run(build, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("megatron-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True, cwd=tmp_path
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    flags = (
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --lr 1e-3 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 10 --train-iters 12 --log-interval 1 --device cpu "
        "--tensor-model-parallel-size 2 --eval-iters 0"
    ).split()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m"]
    for folder, module in (("a", ["megatron", "pretrain-gpt"]), ("b", ["megatron.pretrain_gpt"])):
        done = subprocess.run(
            [*torchrun, *module, *flags, "--save", folder],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert f"report: {folder}/report.html\n" in done.stdout
    installed = tmp_path / "site" / "bin" / "megatron"
    done = subprocess.run(
        [installed, "--version"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == f"megatron {__version__}\n"


@pytest.mark.parametrize(("redirection", "status"), [(">&-", 0), ("> /dev/full", 1)])
def test_output_that_cannot_be_written(redirection: str, status: int) -> None:
    """It is closed, or its disk is full."""
    words = f"{sys.executable} -m megatron plan --model 345m --gpus 1 {redirection}"
    done = subprocess.run(words, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    message = "error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (status, message if status else "")

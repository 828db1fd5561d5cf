"""Run commands of the repository in forked processes, which takes far less time than new interpreters."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT))
MEMORY = 1 << 30  # bytes that a command may take beyond what it shares with this process


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a command. `status` is negative for a signal, None if the command was killed after its time limit."""

    status: int | None
    stdout: str
    stderr: str
    memory: int

    def failure(self) -> str:
        """The name of the failure; "" for a command that succeeded or refused its input with one line."""
        if self.memory > MEMORY:
            return "memory"
        if self.status is None:
            return "hang"
        if "Traceback (most recent call last)" in self.stderr or "panicked at" in self.stderr:
            return "traceback"
        if self.status < 0:
            return "crash"
        errors = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        if self.status and (len(errors) != 1 or len(errors[0]) > 2000):
            return "unclear"
        return ""

    def last_line(self) -> str:
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        return lines[-1][:500] if lines else ""


class Command:
    """A command that runs in a forked process, in `folder`, in a session of its own."""

    def __init__(
        self, words: str, folder: Path, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it. Its output goes to the files `log`.out and `log`.err."""
        self.outputs = log.with_suffix(".out"), log.with_suffix(".err")
        script, *flags = words.split()
        package = "megatron.commands" if script.startswith("tools/") else "megatron"
        module = importlib.import_module(f"{package}.{Path(script).stem}")
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code: object = 1
            try:
                os.setsid()
                self._redirect()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.environ.update(environment or {})
                os.chdir(folder)
                sys.argv = [str(ROOT / script), *flags]
                sys.modules["__main__"] = module  # which processes that it starts import
                code = _status(module.main)
            finally:
                os._exit(code if isinstance(code, int) else 1)
        self.status: int | None = None
        self.memory, self.shared = 0, _memory(os.getpid())
        self.ended = False

    def _redirect(self) -> None:
        for descriptor, path in zip((1, 2), self.outputs, strict=True):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
            os.close(file)

    def poll(self) -> bool:
        """True if the command has ended."""
        if not self.ended:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.ended, self.status = True, os.waitstatus_to_exitcode(status)
        return self.ended

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the command. Returns False if it is still running after `seconds`.

        Kills it once it takes twice the memory that is a failure, before it takes that of the machine.
        """
        end = time.monotonic() + seconds
        while not self.poll():
            if time.monotonic() > end:
                return False
            self.memory = max(self.memory, _memory(self.pid) - self.shared)
            if self.memory > 2 * MEMORY:
                self.kill()
            time.sleep(0.005)
        return True

    def kill(self) -> None:
        """Kill the command and the processes it started."""
        if not self.poll():
            os.killpg(self.pid, signal.SIGKILL)
            while not self.poll():
                time.sleep(0.005)

    def end(self, seconds: float) -> Ended:
        """Wait for the end of the command; kill it after `seconds`."""
        in_time = self.wait(seconds)
        self.kill()
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in self.outputs)
        return Ended(self.status if in_time else None, out, err, self.memory)


def _status(main: Callable[[], int | None]) -> object:
    from megatron.cli import run_command

    try:
        run_command(main)
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _memory(pid: int) -> int:
    """Bytes of memory of a process without mapped files, which the system can drop; 0 once it has ended."""
    with contextlib.suppress(OSError):
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split())
        return (resident - shared) * resource.getpagesize()
    return 0

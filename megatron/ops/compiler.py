"""Functions that torch.compile compiles.

On a GPU these are whole transformer layers, which autograd differentiates. Others are outside of autograd: forward and
backward of an operation are one function each, which its `torch.autograd.Function` calls through a `CompileFn`.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.errors import TrainingFault

logger = logging.getLogger(__name__)

# Calls a function, given with its arguments: `eager`, or a `Compiler`.
CompileFn = Callable[..., Any]

# exp x = exp2(x log₂ e), and exp2 is faster.
LOG2_E = math.log2(math.e)

# Compiled variants of one function: dtypes and sizes of 1 have their own.
MAX_VARIANTS = 64


def eager(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function without compiling it."""
    return function(*arguments)


class Compiler:
    """Compiles each function at its first call. The code is cached in `folder` for later runs."""

    def __init__(self, *, dynamic: bool | None = True, one_graph: bool = True) -> None:
        """`dynamic` is that of torch.compile: True compiles for all sizes, None for the first ones and later, if others
        come, for all. Without `one_graph`, calls of uncompiled functions divide a function into several graphs.

        Raises:
            OSError: the cache folder cannot be made, or other users could put code there.
        """
        settings: dict[str, Any] = {"dynamic": dynamic, "fullgraph": one_graph}
        self.settings = settings | {"options": {"fallback_random": True}}  # as eager code draws
        torch._dynamo.config.nested_graph_breaks = not one_graph  # calls within calls end a graph too
        self.folder = cache_folder()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = self.folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
            raise OSError(
                f"{self.folder}: other users can write to it; set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
            )
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
        # Compile in this process, since worker processes take longer to start and stop.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        self.compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, compiled. Raises TrainingFault if compiling fails, now or for new sizes."""
        compiled = self.compiled.get(function)
        is_known = compiled is not None
        if compiled is None:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
            self.compiled[function] = compiled = torch.compile(function, **self.settings)
        name, begin = function.__name__.strip("_"), time.perf_counter()
        try:
            out = compiled(*arguments)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            raise TrainingFault(
                f"torch.compile worked when the run started and now fails for {name}: {first_error(error)}; "
                "continue with --no-torch-compile"
            ) from error
        if not is_known:
            logger.debug("compiled %s in %.1f s", name, time.perf_counter() - begin)
        return out

    def check(self, device: torch.device) -> str | None:
        """Try to compile a function for `device`. Returns the error in one line, or None."""
        logger.info(
            "torch.compile: compiling operations; this takes up to a minute, and seconds when they are cached"
        )
        begin = time.perf_counter()
        try:
            torch.compile(_probe)(torch.ones(32, device=device))
        except Exception as error:  # torch raises many kinds
            return first_error(error)
        logger.debug("torch.compile works; ready in %.1f s", time.perf_counter() - begin)
        return None


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def first_error(error: Exception) -> str:
    """Cause of a failed compilation in one line: the first error of the C++ compiler, if it ran."""
    text = str(error).strip()
    output = text.partition("\nOutput:\n")[2].strip()
    lines = (output or text or type(error).__name__).splitlines()
    return next((line for line in lines if "rror:" in line), lines[0])[:200]


def cache_folder() -> Path:
    """Folder of compiled code: $TORCHINDUCTOR_CACHE_DIR, or one in the user's cache folder, or with several machines
    in the folder of temporary files."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named:
        return Path(named)
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) < int(os.environ.get("WORLD_SIZE", 1)):
        # Several machines: on a local disk, since a shared one would serve thousands of processes at once.
        return Path(tempfile.gettempdir()) / f"megatron-compiled-{os.getuid()}"
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home
        return Path(tempfile.mkdtemp(prefix="megatron-compiled-"))
    return home / "megatron" / "compiled"

"""Small functions of tensors, each compiled to one pass over memory, or run as it is written.

They take no part in autograd: the forward and the backward formula of an operation are one function each, which its
`torch.autograd.Function` runs.
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

from megatron.flags import TrainingFault

logger = logging.getLogger(__name__)

# Of (function, its arguments): what the function gives.
Run = Callable[..., Any]

# exp x = exp2(x log₂ e), and exp2 takes less time.
LOG2_E = math.log2(math.e)

# Variants of one function: sizes of 1, and dtypes, have their own.
MOST_VARIANTS = 64


def as_written(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function by PyTorch's own operations, one after the other."""
    return function(*arguments)


class Compiler:
    """Runs functions compiled by torch.compile, each from the first time on that it is asked for.

    What is compiled holds for all sizes, so that one length of sequence after another does not compile anew. It is kept
    in `folder` for later runs.
    """

    def __init__(self) -> None:
        """Raises: OSError: the folder cannot be made, or others could put code there."""
        self.folder = cache_folder()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = self.folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
            raise OSError(
                f"{self.folder} is not this user's alone; name a folder that is by TORCHINDUCTOR_CACHE_DIR"
            )
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
        # In this process: other processes to compile in have to be started, waited for and ended.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        self.compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Raises: TrainingFault: it cannot be compiled, now or for other sizes than before."""
        compiled = self.compiled.get(function)
        is_known = compiled is not None
        if not is_known:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
            self.compiled[function] = compiled = torch.compile(function, dynamic=True, fullgraph=True)
        name, begin = function.__name__.strip("_"), time.perf_counter()
        try:
            out = compiled(*arguments)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            raise TrainingFault(
                f"torch.compile, which worked when the run started, cannot compile {name}: {first_error(error)}; add "
                "--no-torch-compile to go on without it"
            ) from error
        if not is_known:
            logger.info("compiled %s in %.1f s", name, time.perf_counter() - begin)
        return out

    def check(self, device: torch.device) -> str | None:
        """Why nothing can be compiled for a device here, in a line; None if it can."""
        logger.info("trying torch.compile, which takes some ten seconds for the first time")
        begin = time.perf_counter()
        try:
            torch.compile(_probe)(torch.ones(32, device=device))
        except Exception as error:  # of whichever of torch's own kinds
            return first_error(error)
        logger.info("torch.compile works, and was ready in %.1f s", time.perf_counter() - begin)
        return None


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def first_error(error: Exception) -> str:
    """What a compilation failed of, in a line: the first error of the C++ compiler, if it was run."""
    text = str(error).strip()
    output = text.partition("\nOutput:\n")[2].strip()
    lines = (output or text or type(error).__name__).splitlines()
    return next((line for line in lines if "rror:" in line), lines[0])[:200]


def cache_folder() -> Path:
    """Where compiled code is kept: $TORCHINDUCTOR_CACHE_DIR, or a folder of the user's own."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named:
        return Path(named)
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return Path(tempfile.mkdtemp(prefix="megatron-compiled-"))
    return home / "megatron" / "compiled"

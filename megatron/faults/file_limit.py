"""The limit of open files, each connection being one."""

from __future__ import annotations

import os
import resource

from megatron.errors import InputError
from megatron.parallel.mesh import world_size

# Files of a process besides the connections to its rendezvous store: data, logs, connections of process groups.
OTHER_FILES = 500


def raise_file_limit() -> None:
    """Raise the limit of open files to the most that this process may have, in a run of several processes.

    Raises:
        InputError: the process that serves the rendezvous store cannot have two connections from every rank.
    """
    ranks = world_size()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if ranks == 1 or hard == resource.RLIM_INFINITY:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # torchrun, which has the limit that this process started with, or rank 0.
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    limit, needed = soft if by_torchrun else hard, 2 * ranks + OTHER_FILES
    if os.environ.get("RANK") == "0" and limit < needed:
        raise InputError(
            f"{ranks} processes need {needed} open files on the machine of rank 0, where the limit is {limit}; run "
            f"ulimit -n {needed} before {'torchrun' if by_torchrun else 'rank 0 starts'}"
        )

"""Flags of the server."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from pathlib import Path

from megatron.errors import InputError
from megatron.files import read_file
from megatron.flags import Config, flag
from megatron.inference.config import InferenceConfig

KEY_VARIABLE = "MEGATRON_API_KEY"
MAX_KEY_BYTES = 1000


def is_loopback(host: str) -> bool:
    """True if a host name or address reaches this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _distinct_names(first: Path, second: Path) -> tuple[str, str]:
    """Return the last parts of two paths, as many as tell them apart."""
    depth = 1
    while first != second and first.parts[-depth:] == second.parts[-depth:]:
        depth += 1
    return "/".join(first.parts[-depth:]), "/".join(second.parts[-depth:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(Config):
    """Address, limits and API key of the server."""

    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 for all addresses of this machine")
    port: int = flag(8000, "port to listen on; 0 for any free port", low=0, high=65535)
    served_model_name: str | None = flag(
        None, "name of the model of --load for clients (default: name of the directory)"
    )
    compare: str | None = flag(
        None,
        "serve this checkpoint too, to compare it with that of --load (default with --compare-ckpt-step: --load)",
        metavar="DIR",
    )
    compare_ckpt_step: int | None = flag(None, "the checkpoint of this iteration of --compare", low=0)
    api_key_file: str | None = flag(
        None,
        f"file with an API key that clients must send (default: environment variable {KEY_VARIABLE}, if set)",
        metavar="FILE",
    )
    max_batch_size: int = flag(32, "sequences generated together", low=1)
    inference_max_seq_length: int | None = flag(
        None,
        "maximum tokens of a sequence, including its prompt (default: the model's context length)",
        low=2,
    )
    max_queue: int = flag(128, "sequences that may wait; further requests are rejected (429)", low=0)
    max_body_bytes: int = flag(2**22, "maximum bytes of a request; larger ones are rejected (413)", low=1)
    request_timeout: float = flag(
        600.0, "seconds after which an unfinished request is cancelled (504)", above=0, high=10**6
    )

    def models(self, load: InferenceConfig) -> dict[str, InferenceConfig]:
        """Return the models to serve, by name: that of --load, and that of --compare if there is one.

        Raises:
            InputError: they are the same, or have the same name.
        """
        folder = Path(load.load).resolve()
        if self.compare is None and self.compare_ckpt_step is None:
            return {self.served_model_name or folder.name: load}
        other = dataclasses.replace(load, load=self.compare or load.load, ckpt_step=self.compare_ckpt_step)
        first, second = names = _distinct_names(folder, Path(other.load).resolve())
        if first == second:
            if load.ckpt_step == other.ckpt_step:
                raise InputError(
                    "--compare: is the checkpoint of --load; give another, or --compare-ckpt-step"
                )
            steps = (load.ckpt_step, other.ckpt_step)
            first, second = (
                f"{name}-{'newest' if step is None else step}"
                for name, step in zip(names, steps, strict=True)
            )
        first = self.served_model_name or first
        if first == second:
            raise InputError(f"--served-model-name: {first} is the name of --compare; choose another")
        return {first: load, second: other}

    def api_key(self) -> str | None:
        """Return the key that clients must send, if any.

        Raises:
            InputError: the file cannot be read or is empty, or there are two keys.
        """
        variable = os.environ.get(KEY_VARIABLE)
        if self.api_key_file is None:
            return variable or None
        if variable:
            raise InputError(f"--api-key-file and {KEY_VARIABLE} both give a key; leave out one of the two")
        try:
            key = read_file(self.api_key_file, MAX_KEY_BYTES).decode("utf-8").strip()
        except OSError as error:
            raise InputError(
                f"--api-key-file: {self.api_key_file} cannot be read ({error.strerror})"
            ) from None
        except UnicodeDecodeError:
            raise InputError(f"--api-key-file: {self.api_key_file} is not UTF-8 text") from None
        if not key:
            raise InputError(f"--api-key-file: {self.api_key_file} is empty; write a key into it")
        return key

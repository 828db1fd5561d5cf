"""Flags of the server."""

from __future__ import annotations

import dataclasses
import ipaddress
import os

from megatron.errors import InputError
from megatron.files import read_file
from megatron.flags import Config, flag

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(Config):
    """Address, limits and API key of the server."""

    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 for all addresses of this machine")
    port: int = flag(8000, "port to listen on; 0 for any free port", low=0, high=65535)
    served_model_name: str | None = flag(
        None, "name of the model for clients (default: name of the directory of --load)"
    )
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

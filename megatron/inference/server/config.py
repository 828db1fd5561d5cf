"""Flags of the server."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from megatron.flags import Config, InputError, flag

KEY_VARIABLE = "MEGATRON_API_KEY"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(Config):
    """Where it listens, and how much it takes on."""

    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 is every one of this machine's")
    port: int = flag(8000, "port to listen on; 0 picks a free one", low=0, high=65535)
    served_model_name: str | None = flag(
        None, "what clients call the model (default: the name of the folder of --load)"
    )
    api_key_file: str | None = flag(
        None,
        f"file of a key that clients must send (default: that of the environment's {KEY_VARIABLE}, if any)",
        metavar="FILE",
    )
    max_batch_size: int = flag(32, "texts that grow side by side", low=1)
    inference_max_seq_length: int | None = flag(
        None, "tokens of a text at most, its prompt among them (default: the model's context)", low=2
    )
    max_queue: int = flag(
        128, "texts that wait for others to end; beyond it requests are refused (429)", low=0
    )
    max_body_bytes: int = flag(2**22, "size of a request at most; a larger one is refused (413)", low=1)
    request_timeout: float = flag(
        600.0, "seconds after which a request ends, finished or not", above=0, high=10**6
    )

    def api_key(self) -> str | None:
        """The key that clients must send, if any.

        Raises:
            InputError: its file cannot be read or holds none, or there are two.
        """
        variable = os.environ.get(KEY_VARIABLE)
        if self.api_key_file is None:
            return variable or None
        if variable:
            raise InputError(f"--api-key-file and {KEY_VARIABLE} both give a key; leave one of them out")
        try:
            key = Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InputError(
                f"--api-key-file: {self.api_key_file} cannot be read ({error.strerror})"
            ) from None
        except UnicodeDecodeError:
            raise InputError(f"--api-key-file: {self.api_key_file} is not UTF-8 text") from None
        if not key:
            raise InputError(f"--api-key-file: {self.api_key_file} is empty; write a key into it")
        return key

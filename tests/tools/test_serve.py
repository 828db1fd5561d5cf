"""tools/serve.py: errors are one line, and come before the model is loaded if possible."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hf_models import save_hf

from megatron.commands.serve import main
from megatron.errors import InputError


def test_a_port_in_use_is_reported_before_the_model_is_loaded() -> None:
    pytest.importorskip("fastapi")
    from megatron.inference.server.config import ServerConfig
    from megatron.inference.server.run import listen

    with listen(ServerConfig(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError, match=f"^--port: {port} is in use; choose another, or 0 for any free port$"
        ):
            main(["--load", "absent", "--port", str(port)])


def test_a_checkpoint_without_tokenizer_names_the_flag(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    folder = save_hf(tmp_path / "model", "gpt2")
    with pytest.raises(InputError, match="has no tokenizer; give --tokenizer, "):
        main(["--load", str(folder), "--port", "0"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.inference.server.run", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    message = "the server needs FastAPI and uvicorn: pip install fastapi uvicorn"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        main(["--load", "absent"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 65536", "--port: 65536 is too large"),
        ("--max-queue -1", "--max-queue: -1 is too small"),
        ("--request-timeout 0", "--request-timeout: 0.0 is too small"),
        ("--api-key-file absent", "--api-key-file: absent cannot be read"),
    ],
)
def test_wrong_flags_are_one_line(flags: str, message: str) -> None:
    pytest.importorskip("fastapi")
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        main(["--load", "absent", *flags.split()])

"""Files of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.inference.prompts import read_prompts


@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "one\n\nétwo\n"),
        ("a.jsonl", '{"prompt": "one"}\n\n{"text": "étwo"}'),
        ("a.txt", "\none\nétwo"),
    ],
)
def test_a_byte_order_mark_is_no_text(tmp_path: Path, begin: bytes, name: str, content: str) -> None:
    (tmp_path / name).write_bytes(begin + content.encode())
    assert [text for _, text in read_prompts("--sample-input-file", tmp_path / name)] == ["one", "étwo"]

"""The tools that prepare data run where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, NoTorch())
from megatron.__main__ import COMMANDS, main
import importlib

if __name__ == "__main__":  # not in the worker processes
    folder = sys.argv[1]
    for words in (
        f"train-tokenizer --input {folder}/a.jsonl --type bpe --vocab-size 260 --output {folder}/tokenizer",
        f"preprocess --input {folder}/a.jsonl --output-prefix {folder}/o --tokenizer {folder}/tokenizer "
        "--append-eod --shard 1/1",
        f"merge --input {folder}/o_text_document --output-prefix {folder}/o_text_document",
        f"inspect-data {folder}/o_text_document --show 1",
    ):
        sys.argv[1:] = words.split()
        main()
    importlib.import_module(COMMANDS["make-corpus"][0])
"""


def test_the_data_tools_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the hen and the hat"}\n' * 3)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from all 1 shards" in done.stdout
    assert done.stdout.endswith("--- document 0\nthe hen and the hat<|endoftext|>\n")

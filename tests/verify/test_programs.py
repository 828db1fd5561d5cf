"""Captures of other programs against this one's: a plain loop of transformers, and Megatron-LM v2.5."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import VOCAB, save_hf
from nvidia import RUN, run_data
from torch import Tensor
from training.test_nvidia_log import LOG

from megatron.checkpoint.checkpoint import Checkpoint, model_config
from megatron.data.config import DataConfig
from megatron.interop.convert import write_native
from megatron.interop.huggingface.read import open_huggingface
from megatron.interop.huggingface.settings import read_settings
from megatron.interop.nvidia.read import open_megatron
from megatron.parallel.slices import whole
from megatron.tokenizer.config import TokenizerConfig
from megatron.variants.mock_data import MockGPTDataset
from megatron.verify.format import CaptureWriter, Record
from megatron.verify.runner import Check, compare_captures

STEPS, LENGTH, BATCH, SEED = 3, 16, 4, 1234
TRAIN = f"""
    --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --seq-length {LENGTH} --train-iters {STEPS}
    --global-batch-size {BATCH} --lr 1e-3 --lr-decay-style constant --weight-decay 0 --adam-beta2 0.95 --eval-iters 0
    --attention-dropout 0 --hidden-dropout 0 --device cpu --num-workers 0 --use-checkpoint-args --finetune
""".split()
LAYERS = {
    "gpt2": {"transformer.ln_f": "decoder.final_layernorm"},
    "llama": {"model.norm": "decoder.final_layernorm"},
}


def converted(checkpoint: Checkpoint, folder: Path) -> Path:
    write_native(checkpoint, folder, lambda size: None)
    return folder


def captures(pretrain: Callable, folder: Path, load: Path, flags: list[object], steps: int) -> list[Path]:
    """Captures of runs that differ in their micro batch sizes, and so in rounding."""
    found = []
    for size in (2, 1, 4):
        found.append(folder / f"capture-{size}")
        capture = ["--capture", found[-1], "--capture-steps", steps, "--load", load]
        pretrain(*flags, "--micro-batch-size", size, *capture)
    return found


def failures(check: Check) -> list[tuple[str, str]]:
    return [(row["kind"], row["name"]) for row in check.failures]


class PlainLoop:
    """Trains a model of transformers, and captures it under the names of this program."""

    def __init__(self, model: Any, folder: Path, names: dict[str, str], capture: Path) -> None:
        read = open_huggingface(folder)
        self.model, self.config = model, model_config(read)
        self.family = read_settings(folder / "config.json").family
        self.parameters = list(read.tensors["model"].index)
        self.writer = CaptureWriter(capture, run={"precision": "fp32"})
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
        )
        self.step = self.sample = self.order = 0
        for name, module in model.named_modules():
            if name in names:
                module.register_forward_hook(lambda _, __, out, name=names[name]: self.add_output(name, out))

    def add_output(self, name: str, out: Tensor | tuple) -> None:
        out = out[0] if isinstance(out, tuple) else out
        self.order += 1
        place = {"name": name, "step": self.step, "sample": self.sample, "order": self.order}
        self.writer.add(Record(kind="activation", **place), out.transpose(0, 1))
        record = Record(kind="activation gradient", **place)
        out.register_hook(lambda grad: self.writer.add(record, grad.transpose(0, 1)))

    def add(self, kind: str, values: dict[str, Tensor], prefix: str = "") -> None:
        """Add tensors by their names in transformers."""
        for name in self.parameters:
            (names,), modules = self.family.tensors(name, self.config)
            joined = modules.join([values[theirs] for theirs in names], self.config)
            self.writer.add(Record(kind=kind, name=prefix + name, step=self.step), joined)

    def train(self, batches: Iterator[Tensor], loss_scale: float = 1.0) -> None:
        """Train on batches of tokens, [batch, length + 1], in microbatches of two samples."""
        named = dict(self.model.named_parameters())
        self.add("parameter", {name: p.detach() for name, p in named.items()})
        for batch in batches:
            self.writer.flush()
            self.step += 1
            before = {name: p.detach().clone() for name, p in named.items()}
            total = 0.0
            for i in range(0, len(batch), 2):
                self.sample, self.order = (self.step - 1) * BATCH + i, 0
                logits = self.model(batch[i : i + 2, :-1]).logits
                losses = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch[i : i + 2, 1:].flatten(), reduction="sum"
                )
                record = Record(kind="loss", name="lm loss", step=self.step, sample=self.sample)
                self.writer.add(record, losses)
                (loss_scale * losses / (BATCH * LENGTH)).backward()
                total += float(losses.detach()) / (BATCH * LENGTH)
            self.add("gradient", {name: p.grad for name, p in named.items()})
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            for name, value in (("lm loss", total), ("grad norm", float(norm))):
                values = torch.tensor(value, dtype=torch.float64)
                self.writer.add(Record(kind="metric", name=name, step=self.step), values)
            self.add("update", {name: p.detach() - before[name] for name, p in named.items()})
            for moment in ("exp_avg", "exp_avg_sq"):
                state = {name: self.optimizer.state[p][moment] for name, p in named.items()}
                self.add("state", state, f"{moment}/")
            self.add("parameter", {name: p.detach() for name, p in named.items()})
            self.optimizer.zero_grad()
        self.writer.flush()


def mock_batches() -> Iterator[Tensor]:
    """Batches of --mock-data in the order of the run."""
    config = DataConfig(mock_data=True, seq_length=LENGTH)
    dataset = MockGPTDataset(config=config, vocab_size=VOCAB, eod=None, samples=STEPS * BATCH, seed=(SEED, 0))
    for step in range(STEPS):
        yield torch.stack([torch.from_numpy(dataset[step * BATCH + i]["text"]) for i in range(BATCH)])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_plain_loop_of_transformers(pretrain: Callable, tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = save_hf(tmp_path / "theirs", kind)
    load = converted(open_huggingface(folder), tmp_path / "ours")
    ours = captures(pretrain, tmp_path, load, TRAIN, STEPS)
    layers = {
        f"{'transformer.h' if kind == 'gpt2' else 'model.layers'}.{i}": f"decoder.layers.{i}" for i in (0, 1)
    }
    for name, scale in (("theirs", 1.0), ("scaled", 1.0001)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        loop = PlainLoop(model, folder, {**LAYERS[kind], **layers}, tmp_path / f"capture-{name}")
        loop.train(mock_batches(), scale)
    check = compare_captures([ours[0], tmp_path / "capture-theirs", *ours[1:]])
    assert check.passed, (failures(check), check.finding)
    assert {"activation", "activation gradient", "loss", "gradient", "update", "state"} <= check.kinds.keys()
    check = compare_captures([ours[0], tmp_path / "capture-scaled", *ours[1:]])
    assert check.finding is not None and check.finding.what == "activation gradient"
    assert (
        check.finding.module == "decoder.final_layernorm" and check.finding.pattern == "scaled: 1.0001 times"
    )


def test_megatron_lm(pretrain: Callable, shared: Path, tmp_path: Path) -> None:
    """Losses, weights and moments of a run of v2.5, whose files and log NVIDIA's code wrote."""
    vectors = shared / "vectors" / "gpt-v2.5"
    begin, end = (
        open_megatron(vectors / name, TokenizerConfig(vocab_size=5000)) for name in ("init_tp1", "after6_tp1")
    )
    flags = [*RUN, *run_data(shared, tmp_path / "cache"), "--finetune"]
    ours = captures(pretrain, tmp_path, converted(begin, tmp_path / "native"), flags, 6)
    theirs = CaptureWriter(tmp_path / "theirs", run={"precision": "fp32"})
    for step in range(7):
        checkpoint = {0: begin, 6: end}.get(step)
        for kind, word in (("model", "parameter"), ("optimizer", "state")) if checkpoint else ():
            tensors = checkpoint.tensors.get(kind)
            for name, row in tensors.index.items() if tensors else ():
                theirs.add(Record(kind=word, name=name, step=step), tensors.read(name, whole(*row["shape"])))
        if step:
            loss = float(LOG.strip().splitlines()[step - 1].split()[2])
            theirs.add(
                Record(kind="metric", name="lm loss", step=step), torch.tensor(loss, dtype=torch.float64)
            )
        theirs.flush()
    check = compare_captures([ours[0], tmp_path / "theirs", *ours[1:]])
    assert check.passed, (failures(check), check.finding)
    assert check.kinds["metric"]["compared"] == 6
    assert check.kinds["parameter"]["compared"] == 56 and check.kinds["state"]["compared"] == 56

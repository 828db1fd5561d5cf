r"""Fine-tune a pretrained BERT to classify texts, and tell its accuracy on each file after every epoch.

    python tools/finetune_bert.py --task MNLI --train-data MNLI/train.tsv \
        --valid-data MNLI/dev_matched.tsv MNLI/dev_mismatched.tsv --load bert-checkpoints --save mnli \
        --seq-length 128 --micro-batch-size 32 --epochs 3 --lr 5e-5 --lr-warmup-fraction 0.065

The model's sizes and its tokenizer are those of the checkpoint of --load, whatever layout it was saved in; without
--load training begins at random weights. The best checkpoint is kept in the folder `best` of --save. The same command
again continues a run that was stopped. torchrun in place of python starts several processes.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.arguments import make_config, run_command, run_config, run_parser, run_values
from megatron.checkpoint.config import CheckpointConfig
from megatron.parallel.mesh import world_size
from megatron.training.finetune import (
    FinetuneConfig,
    FineTuner,
    finetune_task,
    holds_run,
    read_examples,
    with_epochs,
)
from megatron.training.pretrain import pretrain

DEFAULTS = {"tokenizer_type": "BertWordPieceLowerCase"}
# Flags of a training run that epochs and files of examples take the place of, or that no classifier has.
WITHOUT = """
    train_iters train_samples rampup_batch_size eval_interval eval_iters skip_train save_interval finetune
    load_optim save_optim use_checkpoint_args use_checkpoint_opt_param_scheduler data_path train_data_path
    valid_data_path test_data_path split mock_data data_cache_path data_order dataloader_type reset_position_ids
    reset_attention_mask eod_mask_loss mask_prob short_seq_prob bert_binary_head lr_decay_samples lr_warmup_samples
<<<<<<< HEAD
    lr_wsd_decay_samples eval_tasks eval_tasks_data overlapping_eval strict_lambada
=======
    lr_wsd_decay_samples dry_run world_size dry_run_ranks dry_run_json
>>>>>>> a89ae59 (A dry run: the true step on fake tensors counts memory, communication and operations)
""".split()


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = run_parser(__doc__, DEFAULTS, own={"fine-tuning": FinetuneConfig}, without=WITHOUT)
    values = run_values(argv, parser, DEFAULTS, model_of=model_of)
    finetune = make_config(FinetuneConfig, values)
    # How many iterations epochs are is known when the files are read; the flags are checked before.
    config = run_config(values | {"train_iters": 1})
    say = print if os.environ.get("RANK", "0") == "0" else lambda _: None
    examples = read_examples(finetune, say)
    parallel = config.parallel
    replicas = world_size() // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
    config = with_epochs(config, finetune, len(examples.train), max(1, replicas), say)
    task = finetune_task(finetune, examples)
    return pretrain(config, task, functools.partial(FineTuner, finetune=finetune))


def model_of(config: CheckpointConfig) -> str | None:
    """The folder whose checkpoint has the sizes of the model."""
    return config.save if holds_run(config.save) else config.load


if __name__ == "__main__":
    run_command(main)

r"""Fine-tune a pretrained BERT to classify texts, with its accuracy on each file after every epoch.

    megatron finetune-bert --task MNLI --train-data MNLI/train.tsv \
        --valid-data MNLI/dev_matched.tsv MNLI/dev_mismatched.tsv --load bert-checkpoints --save mnli \
        --seq-length 128 --micro-batch-size 32 --epochs 3 --lr 5e-5 --lr-warmup-fraction 0.065

The model's architecture and tokenizer come from the checkpoint of --load; without --load the weights are random. The
best checkpoint is kept in the folder `best` of --save. Repeat the command to resume a run that was stopped. `torchrun
-m megatron finetune-bert` starts several processes.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence

from megatron.arguments import run_config, run_parser, run_values
from megatron.checkpoint.config import CheckpointConfig
from megatron.cli import make_config, run_command
from megatron.finetuning.finetune import (
    EpochEvaluation,
    FinetuneConfig,
    finetune_task,
    has_run,
    read_examples,
    with_epochs,
)
from megatron.parallel.mesh import axis_sizes, world_size
from megatron.plugins import checked, train, training_hooks
from megatron.settings.checkpoint_args import add_checkpoint_args
from megatron.settings.shorthands import expand_shorthands
from megatron.settings.tokenizer import expand_tokenizer

DEFAULTS = {"tokenizer_type": "BertWordPieceLowerCase"}
# Flags of a training run that epochs and files of examples replace, or that do not apply to classification.
WITHOUT = """
    train_iters train_samples train_tokens train_epochs
    rampup_batch_size eval_interval eval_iters skip_train save_interval save_best finetune
    load_optim save_optim use_checkpoint_args use_checkpoint_opt_param_scheduler data_path train_data_path
    valid_data_path test_data_path split mock_data data_cache_path data_order dataloader_type packing reset_position_ids
    reset_attention_mask eod_mask_loss mask_prob short_seq_prob bert_binary_head padding_free lr_decay_samples
    lr_warmup_samples lr_wsd_decay_samples eval_tasks eval_tasks_data overlapping_eval strict_lambada dry_run world_size
    dry_run_ranks dry_run_json loss_mean
""".split()


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = run_parser(__doc__, DEFAULTS, own={"fine-tuning": FinetuneConfig}, without=WITHOUT)
    add_model = functools.partial(add_checkpoint_args, model_folder=model_folder)
    values = run_values(argv, parser, DEFAULTS, after=[expand_shorthands, expand_tokenizer, add_model])
    finetune = make_config(FinetuneConfig, values)
    # The number of iterations is known once the files are read; the flags are checked before.
    config = run_config(values | {"train_iters": 1})
    log = print if os.environ.get("RANK", "0") == "0" else lambda _: None
    examples = read_examples(finetune, log)
    task = finetune_task(finetune, examples)
    config = checked(config, task)
    replicas = axis_sizes(config.parallel, world_size())["dp"]
    config = with_epochs(config, finetune, len(examples.train), replicas, log)
    return train(config, task, training_hooks([EpochEvaluation(finetune)]))


def model_folder(config: CheckpointConfig) -> str | None:
    """The folder of the checkpoint that has the model's architecture."""
    return config.save if has_run(config.save) else config.load


if __name__ == "__main__":
    run_command(main)

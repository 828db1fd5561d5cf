"""A schedule of your own: a learning rate that falls in three steps. The hook is called between steps of training.

python -m examples.own_schedule [flags of pretrain_gpt.py]
"""

from __future__ import annotations

from megatron.api import GPT, Hook, Schedule, Trainer, main


class Steps(Schedule):
    """A third of the learning rate after each third of the decay."""

    def lr(self, consumed_samples: int) -> float:
        return self.max_lr / 3 ** min(3 * consumed_samples // self.decay, 2)


class UseSteps(Hook):
    """Replaces the schedule of a run before its first step."""

    def before_training(self, trainer: Trainer) -> None:
        trainer.state.schedule = Steps(**vars(trainer.state.schedule))


MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64}
DATA = {"tokenizer_type": "NullTokenizer", "vocab_size": 256, "mock_data": True, "micro_batch_size": 8}

if __name__ == "__main__":
    main(
        GPT, description=__doc__, defaults=MODEL | DATA | {"lr": 3e-3, "train_iters": 100}, hooks=[UseSteps()]
    )

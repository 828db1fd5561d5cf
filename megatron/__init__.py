"""Pretraining of GPT and BERT language models by tensor, pipeline and data parallelism."""

__version__ = "0.1.0"

"""Faults in packed documents that `benchmarks/verify.py` puts into the program, besides those of `verify_faults`."""

from __future__ import annotations

from verify_faults import Fault

MODEL, TASK = "megatron.model.gpt:GPTModel.layer_inputs", "megatron.pretrain_gpt:forward"
BATCH = "megatron.data.gpt_dataset:ltor_batch"
DOCUMENTS = "megatron.ops.cpu.document_attention"
_ATTENTION = r"^activation of decoder\.layers\.0\.self_attention"

# Only the second replica of two has a sample with several documents in the first step.
PACKING_FAULTS = (
    Fault(
        name="attention across the borders of documents",
        run="d2 documents",
        target=MODEL,
        old="document_ids_bs=document_ids_bs,",
        new="document_ids_bs=None,",
        module=_ATTENTION,
        kind=".",
        like="#3608",
        ranks=(1,),
    ),
    Fault(
        name="attention across the borders of documents with tensor parallelism",
        run="t2 documents",
        target=MODEL,
        old="document_ids_bs=document_ids_bs,",
        new="document_ids_bs=None,",
        module=_ATTENTION,
        kind=".",
        like="#3608",
    ),
    Fault(
        name="the last stage does not know the documents",
        run="p2 documents",
        target=TASK,
        old="document_ids_bs=batch.document_ids,",
        new="document_ids_bs=None if hidden is not None else batch.document_ids,",
        module=r"^activation of decoder\.layers\.1\.self_attention",
        kind=".",
        like="#3608",
        ranks=(1,),
    ),
    Fault(
        name="the mask of the first microbatch is cached for all",
        run="d2 documents",
        target=MODEL,
        old="mask_bnst=self.context.ops.make_mask(spec),",
        new="mask_bnst=self.__dict__.setdefault('_cached', self.context.ops.make_mask(spec)),",
        module=_ATTENTION,
        kind=".",
        like="#1298",
        ranks=(1,),
    ),
    Fault(
        name="the mask of the first sequence for all of its microbatch",
        run="d2 documents",
        target=f"{DOCUMENTS}:make_document_mask",
        old="return DocumentMask(rows, spec)",
        new="return DocumentMask([rows[0]] * len(rows), spec)",
        module=_ATTENTION,
        kind=".",
        ranks=(1,),
    ),
    Fault(
        name="a document begins with the end of the one before it",
        run="d2 documents",
        target=BATCH,
        old="starts[:, 1:] |= ends[:, :-1]",
        new="starts |= ends",
        module=r"^activation of (embedding|decoder\.layers\.0\.self_attention)",
        kind=".",
        ranks=(1,),
    ),
    Fault(
        name="positions go on from one document to the next",
        run="d2 documents",
        target=BATCH,
        old="if config.reset_position_ids:",
        new="if False:",
        module=r"^activation of embedding\.position",
        kind=".",
        ranks=(1,),
    ),
    Fault(
        name="the loss counts what follows the end of a document",
        run="d2 documents",
        target=BATCH,
        old="if config.eod_mask_loss:",
        new="if False:",
        module="^metric of loss denominators|^loss|^activation gradient",
        kind=".",
        like="#1298",
        ranks=(1,),
    ),
    Fault(
        name="keys have no gradient from attention within documents",
        run="d2 documents",
        target=f"{DOCUMENTS}:attention_by_document",
        old="k_bgsd.split(1)",
        new="k_bgsd.detach().split(1)",
        module=r"gradient of decoder\.layers\.\d\.(self_attention|input_layernorm)",
        kind=".",
        ranks=(1,),
    ),
)

"""Hand-written MoE layers, as people write them. Parameters are named as in the spelling that each imitates.

A *combine* or *experts* function is one spelling: it takes the layer, ``x`` ([T, D] or [B, S, D]), the routing weights
and the expert ids. They are in ``zoo_*.py``, by family.
"""

from tests.corpus.zoo.batched import (
    dense_bmm,
    dense_buffer,
    dense_cat,
    dense_einsum,
    dense_llama4,
    dense_modules,
    dense_then_gather,
    dense_then_index,
    gathered_bmm,
    gathered_einsum,
    gathered_gpt_oss,
    gathered_per_slot,
    gathered_rows,
)
from tests.corpus.zoo.einsum import (
    einsum_combined,
    einsum_dispatched,
    einsum_masked_tokens,
    einsum_of_slots,
    einsum_weighted_tokens,
)
from tests.corpus.zoo.joined import joined_hits, joined_index_add, joined_inverse, joined_slots, joined_unsort, joined_weights
from tests.corpus.zoo.loops import (
    dbrx_loop,
    ellipsis_loop,
    gpt_oss_loop,
    loop_boolean_mask,
    loop_deepseek,
    loop_dense_scores,
    loop_flat_mask,
    loop_joined_slots,
    loop_litgpt,
    loop_minimind,
    loop_mistral,
    loop_mixtral,
    loop_nonzero,
    loop_scatter_add,
    loop_slots,
    loop_switch,
    packed_loop,
    stacked_linear_loop,
    stacked_loop,
    weighted_bias_loop,
)
from tests.corpus.zoo.masked import (
    masked_add_method,
    masked_addcmul,
    masked_inplace,
    masked_list_sum,
    masked_per_slot,
    masked_scaled_tokens,
    masked_stack,
    masked_stack_einsum,
    masked_sum,
)
from tests.corpus.zoo.modules import FF, BareMLP, D, E, GluMLP, K, ModuleListMoE, PlainMLP, Router, StackedMoE
from tests.corpus.zoo.nonzero import nonzero_joined, nonzero_loop, nonzero_mask, nonzero_stored, nonzero_where
from tests.corpus.zoo.sorted import (
    grouped_mm_fallback,
    sorted_index_add,
    sorted_llama4,
    sorted_rows,
    sorted_scaled_wide,
    sorted_torchtitan,
    sorted_torchtune,
    sorted_transformers,
    sorted_transformers_bias,
)

__all__ = ["FF", "BareMLP", "D", "E", "GluMLP", "K", "ModuleListMoE", "PlainMLP", "Router", "StackedMoE", "grouped_mm_fallback"]

MASKED = (
    masked_sum,
    masked_inplace,
    masked_add_method,
    masked_list_sum,
    masked_stack,
    masked_stack_einsum,
    masked_per_slot,
    masked_addcmul,
    masked_scaled_tokens,
)
LOOPS = (
    loop_mixtral,
    loop_mistral,
    loop_nonzero,
    loop_dense_scores,
    loop_boolean_mask,
    loop_deepseek,
    loop_litgpt,
    loop_scatter_add,
    loop_minimind,
    loop_switch,
    loop_flat_mask,
    loop_slots,
    loop_joined_slots,
)
JOINED = (joined_index_add, joined_weights, joined_hits, joined_slots, joined_unsort, joined_inverse)
NONZERO = (nonzero_loop, nonzero_mask, nonzero_where, nonzero_joined, nonzero_stored)
BATCHED = (dense_modules, dense_then_gather, dense_then_index, dense_buffer, dense_cat)
SEPARATE = (*MASKED, *LOOPS, *JOINED, *NONZERO, *BATCHED)
"""Spellings of separate experts, for `ModuleListMoE`."""

# (spelling, storage, biases)
STACKED = (
    (stacked_loop, "split", False),
    (stacked_linear_loop, "linear", False),
    (packed_loop, "packed", False),
    (gpt_oss_loop, "packed", True),
    (weighted_bias_loop, "packed", True),
    (dbrx_loop, "rows", False),
    (sorted_transformers, "packed_linear", False),
    (sorted_transformers_bias, "packed", True),
    (sorted_torchtitan, "linear", False),
    (sorted_index_add, "split", False),
    (gathered_einsum, "linear", False),
    (gathered_bmm, "packed_linear", False),
    (gathered_gpt_oss, "packed_linear", True),
    (gathered_per_slot, "linear", False),
    (dense_einsum, "split", False),
    (dense_bmm, "packed", True),
    (dense_llama4, "packed", False),
    (sorted_rows, "rows", False),
    (sorted_llama4, "split", False),
    (gathered_rows, "rows", False),
    (ellipsis_loop, "split", False),
    (sorted_torchtune, "split", False),
    (sorted_scaled_wide, "split", False),
    (einsum_masked_tokens, "split", False),
    (einsum_dispatched, "split", False),
    (einsum_weighted_tokens, "split", False),
    (einsum_combined, "split", False),
    (einsum_of_slots, "split", False),
)
BY_NAME = {entry[0].__name__: entry for entry in STACKED}


def separate(combine, **options) -> ModuleListMoE:
    """The layer of a spelling in ``SEPARATE``, with experts that hold no more than it reads."""
    return ModuleListMoE(combine, GluMLP if combine.__name__ == "dense_modules" else BareMLP, **options)


def stacked(name: str, **options) -> StackedMoE:
    """The layer of a spelling in ``STACKED``."""
    function, storage, bias = BY_NAME[name]
    return StackedMoE(function, storage, bias=bias, **options)

"""A near-miss twin of every layer of ``zoo.catalogue``: the same source with one piece of text replaced.

``TWINS`` has the old and the new text by the name of the spelling; those in ``STILL_LAYERS`` are rewritten, as what they
now compute, and the others are left alone.
"""

from collections.abc import Callable

from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.corpus.zoo.changed import changed

TWINS = {
    "masked_sum": ("ids == e", "ids >= e"),
    "masked_inplace": ("weights, 0.0)", "weights, 0.1)"),
    "masked_add_method": ("ids != e", "ids > e"),
    "masked_list_sum": (".sum(-2)", ".amax(-2)"),
    "masked_stack": ("(-1, ids, weights)", "(-1, ids, weights) + 0.1"),
    "masked_stack_einsum": ('einsum("tk,tke->te", weights,', 'einsum("tk,tke->te", weights.softmax(0),'),
    "masked_per_slot": ("k : k + 1", ":1"),
    "masked_addcmul": ("expert(x)", "expert(x + out)"),
    "masked_scaled_tokens": ("expert(x)", "expert(x * (e + 1))"),
    "loop_mixtral": ("index_add_", "index_copy_"),
    "loop_mistral": ("+=", "="),
    "loop_nonzero": ("hits[:, 1]", "hits[:, 1] * 0"),
    "loop_dense_scores": (".any(dim=-1)", ".all(dim=-1)"),
    "loop_boolean_mask": ("share[mask]", "share[:1]"),
    "loop_deepseek": ("torch.where(ids == e)", "torch.where(ids == e // 2)"),
    "loop_litgpt": ("permute(2, 0, 1)", "permute(2, 0, 1).flip(1)"),
    "loop_scatter_add": ("out.scatter_add(", "out.scatter("),
    "loop_minimind": ("expert(rows[chosen == e])", "expert(rows[chosen == e].flip(0))"),
    "loop_switch": ("expert(x[token])", "expert(x[token]) + x[token]"),
    "dense_modules": ("(y * scores", "(y.square() * scores"),
    "dense_then_gather": ("ids.unsqueeze(-1)", "(ids // 2).unsqueeze(-1)"),
    "dense_then_index": ("y[ids,", "y[ids - 1,"),
    "stacked_loop": ("self.w2[e]", "self.w2[0]"),
    "stacked_linear_loop": ("F.linear(x, w3)", "F.linear(x.flip(0), w3)"),
    "packed_loop": ("chunk(2, dim=-1)", "chunk(2, dim=-1)[::-1]"),
    "gpt_oss_loop": ("max=7.0), up", "max=6.0), up"),
    "weighted_bias_loop": ("self.down_bias[e] * share", "self.down_bias[e] * weights[token, 1 - slot, None]"),
    "dbrx_loop": ("@ w1[e].t()", "@ w1[e - 1].t()"),
    "sorted_transformers": ("sample_weights[perm]", "sample_weights[inv]"),
    "sorted_transformers_bias": ("self.down_bias[grouped_ids]", "self.down_bias[expert_ids]"),
    "sorted_torchtitan": ("ids.view(-1), self.E)", "ids.flip(0).reshape(-1), self.E)"),
    "sorted_index_add": ("counts.cumsum(0)", "counts.flip(0).cumsum(0)"),
    "gathered_einsum": ("self.w2[ids]", "self.w2[ids.flip(1)]"),
    "gathered_bmm": ("repeat_interleave(top_k, dim=0)", "repeat(top_k, 1)"),
    "gathered_gpt_oss": ("self.down_bias[ids, ...]", "self.down_bias[ids.flip(1), ...]"),
    "gathered_per_slot": ("weights[:, k, None]", "weights[:, k - 1, None]"),
    "dense_einsum": ("(-1, ids, weights)", "(-1, ids, weights).softmax(-1)"),
    "dense_bmm": ("scores.transpose(0, 1)", "scores.transpose(0, 1).flip(0)"),
    "dense_llama4": ("scores.reshape(-1, 1)", "(scores.reshape(-1, 1) + 1)"),
    "sorted_rows": ("self.w1, self.v1, self.w2)", "self.w1, self.v1, self.w2.flip(0))"),
    "sorted_llama4": ("weights.flatten()[order, None]", "weights.flatten()[:, None]"),
    "loop_flat_mask": ("out[mask] +=", "out[mask] ="),
    "loop_joined_slots": ("expert(x[token])", "expert(x[token.flip(0)])"),
    "loop_slots": (".nonzero().flatten()", ".nonzero().flatten().flip(0)"),
    "dense_buffer": ("= expert(x)", "= expert(x).cumsum(0)"),
    "dense_cat": ("scatter_(1, ids, weights)", "scatter_(1, ids, weights).cumsum(1)"),
    "ellipsis_loop": ("gate * torch.sigmoid(gate)", "gate * torch.sigmoid(gate.flip(-1))"),
    "sorted_torchtune": ("max=self.E)", "max=self.E + 1)"),
    "sorted_scaled_wide": ("weights.view(-1)[order]", "weights.view(-1)"),
    "joined_index_add": ("torch.cat(outs)", "torch.cat(outs[::-1])"),
    "joined_weights": ("torch.cat(shares)", "torch.cat(shares).flip(0)"),
    "joined_hits": ("weights[hits[:, 0], hits[:, 1]]", "weights[hits[:, 0], 1 - hits[:, 1]]"),
    "joined_slots": (".index_copy(0, torch.cat(slots)", ".index_copy(0, torch.cat(slots[::-1])"),
    "joined_unsort": ("torch.cat(slots).argsort()", "torch.cat(slots)"),
    "joined_inverse": ("weights.reshape(-1)[order, None]", "weights.reshape(-1)[:, None]"),
    "nonzero_loop": ("> 0", "> 0.4"),
    "nonzero_mask": ("scores[:, e].bool()", "scores[:, e - 1].bool()"),
    "nonzero_where": ("scores != 0", "scores != 0.5"),
    "nonzero_stored": ("x, chosen.to(x.dtype))", "x, chosen.flip(1).to(x.dtype))"),
    "nonzero_joined": ("torch.nonzero(scores[:, e])", "torch.nonzero(scores[:, e].round())"),
    "einsum_masked_tokens": ("F.one_hot(ids, self.E)", "F.one_hot(ids.flip(0), self.E)"),
    "einsum_dispatched": ("F.one_hot(ids, self.E)", "F.one_hot(ids.flip(0), self.E)"),
    "einsum_weighted_tokens": ("(self.w1, self.w3)", "(self.w1, self.w3.flip(0))"),
    "einsum_combined": ("ad\", self.w2", "ad\", self.w2.flip(1)"),
    "einsum_of_slots": ("tk,tke,ted->td", "tk,tme,ted->td"),
    "gathered_rows": ("weights.unsqueeze(-1)).sum(1)", "weights.unsqueeze(-1)).amax(1)"),
}

STILL_LAYERS = {
    "masked_stack_einsum", "masked_per_slot", "packed_loop", "gpt_oss_loop", "sorted_rows", "gathered_per_slot", "stacked_loop",
    "dbrx_loop",  # of weights in another order
    "nonzero_where",  # with a mask of the weights that are no 0.5
    "gathered_rows", "gathered_gpt_oss",  # of slots as tokens, each with an expert of its own
    "einsum_weighted_tokens", "einsum_combined",  # of weights that the graph computes
    "loop_dense_scores", "nonzero_loop", "nonzero_mask",  # with a mask of each expert, of the tokens that it keeps
}  # fmt: skip
MIXTURES = {"dense_cat", "dense_einsum", "masked_list_sum"}
"""Of all experts: a layer is right, and made of it on a GPU alone."""


def _twin(function: Callable) -> Callable:
    return changed(function, TWINS[function.__name__])


def build(name: str) -> nn.Module:
    """The layer of a spelling with its twin in place of it."""
    for function in zoo.SEPARATE:
        if function.__name__ == name:
            return zoo.separate(_twin(function))
    function, storage, bias = zoo.BY_NAME[name]
    return zoo.StackedMoE(_twin(function), storage, bias=bias)

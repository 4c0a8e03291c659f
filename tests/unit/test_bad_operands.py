"""Every argument of every operator, changed in every way that it must refuse: errors of our own, by name."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moeblaze_ops.kernels.eight_bits import packed
from tests.corpus.layers import make_layer
from tests.tools.op_harness import detach

OPS = torch.ops.moeblaze


LEARNED = "sigmoid(p0 * g) * g * u"
"""An activation that reads a parameter."""


@functools.cache
def arguments() -> dict[str, dict[str, Any]]:
    """A call of each operator that is right: T=19, K=2, E=5, D=24, F=12."""
    return {op: {name: detach(value) for name, value in given.items()} for op, given in _arguments().items()}


def _arguments() -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    layer = make_layer("empty_expert", dtype=torch.float32, bias=True, requires_grad=False)
    names = ("slots_N", "offsets_E1", "positions_TK", "blocks_B2")
    routing = dict(zip(names, layer.routing, strict=True))
    slots = {"slots_N": routing["slots_N"], "offsets_E1": routing["offsets_E1"], "top_k": 2}
    x, weights, act = {"x_TD": layer.x_TD}, {"weights_TK": layer.weights_TK}, {"activation": "swiglu"}
    up, down = {"w_up": layer.w_up, "b_up": layer.b_up}, {"w_down": layer.w_down, "b_down": layer.b_down}
    h, a = OPS.expert_up(layer.x_TD, layer.w_up, layer.b_up, None, *layer.routing, "swiglu")
    dout = {"dout_TD": torch.randn(19, 24)}
    mlp = x | up | down | weights | routing | act | {"weight_on_input": False}
    chunked = x | up | down | weights | {"experts_TK": layer.experts_TK, "num_experts": 5, "chunk_tokens": 8} | act
    chunked |= {"weight_on_input": False}
    needs = {"needs": [True] * 5}
    sums = {"dw_up": [torch.zeros_like(w) for w in layer.w_up], "dw_down": [torch.zeros_like(w) for w in layer.w_down]}
    logits = torch.randn(19, 5)
    routed = dict(zip(("weights_TK", "experts_TK"), OPS.route(logits, None, 2, "softmax", True, 1.0, 1, 1), strict=True))
    scoring = {"scoring": "softmax", "renormalize": True, "scale": 1.0}
    biases = {"rows_NC": h.flatten(1)}
    drawn = {"seed": torch.zeros(1), "top_k": 2, "p": 0.5}
    rows, a_up, a_down = torch.randn(38, 3), torch.randn(5, 3, 24), torch.randn(5, 3, 12)
    return {
        "dispatch": {"experts_TK": layer.experts_TK, "num_experts": 5},
        "expert_up": x | up | weights | routing | act
        | {"u_NR": rows, "lora_a_ERD": a_up, "lora_b_EGFR": torch.randn(5, 2, 12, 3)},
        "expert_up_h8": x | up | weights | routing | act
        | {"u_NR": rows, "lora_a_ERD": a_up, "lora_b_EGFR": torch.randn(5, 2, 12, 3)},
        "expert_up_backward": {"dh_NGF": h} | x | {"w_up": layer.w_up} | weights | routing
        | {"dlogits_TE": logits, "w_router_ED": torch.randn(5, 24), "max_bytes": 1 << 20}
        | {"du_NR": rows, "lora_a_ERD": a_up},
        "expert_down": {"h_NGF": h, "a_NF": a} | down | weights | routing | act
        | {"v_NR": rows, "lora_a_ERF": a_down, "lora_b_ERD": a_up, "params_EP": None, "h8_NGB": packed(h)},
        "expert_down_backward": dout | {"h_NGF": h} | down | weights | routing | act | {"q_NR": rows, "lora_a_ERF": a_down},
        "expert_down_backward_learned": dout | {"h_NGF": h} | down | weights | routing | {"activation": LEARNED}
        | {"q_NR": rows, "lora_a_ERF": a_down, "params_EP": torch.rand(5, 1)},
        "expert_rows": {"rows_NGF": h, "w_EGFC": torch.randn(5, 2, 12, 3)}
        | {name: routing[name] for name in ("offsets_E1", "blocks_B2")},
        "low_rank_backward": {"dy": h, "u_NR": rows, "b": torch.randn(5, 2, 12, 3)} | weights | routing,
        "expert_mlp": mlp,
        "expert_mlp_backward": dout | mlp,
        "expert_mlp_chunked": chunked,
        "expert_mlp_chunked_backward": dout | chunked | needs,
        "expert_mlp_ranged": mlp | {"max_bytes": 1 << 20},
        "expert_mlp_ranged_backward": dout | mlp | {"max_bytes": 1 << 20} | needs,
        "expert_mlp_ranged_backward_add": dout | mlp | {"max_bytes": 1 << 20} | needs | sums,
        "expert_weight_grad": {"gathered_TD": layer.x_TD, "grouped_NGF": h, "like": layer.w_up} | weights | slots,
        "expert_weight_grad_add": {"gathered_TD": layer.x_TD, "grouped_NGF": h, "dw": sums["dw_up"]} | weights | slots,
        "expert_bias_grad": biases | weights | slots | {"gathered": False},
        "expert_bias_grad_add": biases | {"db_EC": torch.zeros(5, 24)} | weights | slots | {"gathered": False},
        "route": {"logits_TE": logits, "bias_E": torch.zeros(5), "top_k": 2} | scoring | {"num_groups": 1, "top_groups": 1},
        "route_backward": {"dweights_TK": torch.randn(19, 2), "logits_TE": logits} | routed | scoring,
        "route_at": {"logits_TE": logits, "experts_TK": routed["experts_TK"]} | scoring,
        "router_sums": {"logits_TE": logits, "kept_T": torch.ones(19, dtype=torch.bool)},
        "router_sums_backward": {"dsums_E": torch.randn(5), "dsquares": None, "logits_TE": logits, "kept_T": None},
        "expert_counts": {"experts_TK": layer.experts_TK, "num_experts": 5},
        "router_logits": {"x_TD": layer.x_TD, "w_ED": torch.randn(5, 24)},
        "router_weight_grad": {"dlogits_TE": logits, "x_TD": layer.x_TD},
        "sum_dropped": {"rows_ND": torch.randn(38, 24)} | drawn,
        "sum_dropped_backward": dout | drawn,
    }  # fmt: skip


TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "no axis": lambda t: torch.zeros((), dtype=t.dtype),
    "an axis more": lambda t: t.unsqueeze(0),
    "an axis less": lambda t: t[0],
    "another last size": lambda t: torch.cat([t, t], -1),
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
    "wrong kind": lambda t: t.long() if t.is_floating_point() else t.float(),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
}
NUMBERS = {"zero": 0, "negative": -1}


def changes(op: str, given: dict[str, Any]) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    for name, value in given.items():
        if isinstance(value, Tensor):
            yield from ((name, how, lambda v=value, c=change: c(v)) for how, change in TENSORS.items())
        elif isinstance(value, list) and isinstance(value[0], Tensor):
            yield from ((name, how, lambda v=value, c=change: [c(t) for t in v]) for how, change in TENSORS.items())
            yield name, "three", lambda v=value: v * 3
            if name not in ("b_up", "b_down", "dw_up", "dw_down"):
                yield name, "empty", list
        elif isinstance(value, list):
            yield name, "short", lambda: [True]
        elif isinstance(value, str):
            yield name, "unknown", lambda: "mish"
        elif isinstance(value, float):
            yield from ((name, str(number), lambda n=number: n) for number in (0.0, -1.0, float("nan"), float("inf")))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield from ((name, how, lambda n=number: n) for how, number in NUMBERS.items())


ACCEPTED = {
    # Sizes that nothing else has, and routing weights that are read by slot.
    "dispatch experts_TK another last size", "expert_bias_grad rows_NC another last size",
    "expert_bias_grad offsets_E1 another last size", "route_backward logits_TE another last size",
    "expert_rows w_EGFC another last size", "expert_up_backward dlogits_TE another last size",
    "route_at experts_TK another last size", "route_at logits_TE another last size", "router_sums logits_TE another last size",
    "router_sums kept_T bool", "sum_dropped rows_ND another last size", "sum_dropped_backward dout_TD another last size",
    "sum_dropped p 0.0", "sum_dropped_backward p 0.0",
    "expert_counts experts_TK another last size", "expert_counts experts_TK meta",
    "router_weight_grad dlogits_TE another last size", "router_weight_grad x_TD another last size",
    "expert_weight_grad weights_TK an axis more", "expert_weight_grad_add weights_TK an axis more",
    "expert_bias_grad weights_TK an axis more", "expert_bias_grad_add weights_TK an axis more",
    # What is asked for on the meta device; `like` is for shapes and strides.
    "dispatch experts_TK meta", "expert_weight_grad like meta",
}  # fmt: skip


def bad_operands(op: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls of an operator that it must refuse: what is wrong, and all arguments."""
    given = arguments()[op]
    for name, how, change in changes(op, given):
        if f"{op} {name} {how}" not in ACCEPTED:
            yield f"{name} {how}", given | {name: change()}


def call(op: str, given: dict[str, Any]) -> Any:
    return getattr(OPS, op)(*given.values())


def answer(op: str, given: dict[str, Any]) -> str:
    """What the operator says of these arguments."""
    try:
        call(op, given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_there_is_a_call_of_every_operator():
    registered = [
        name.removeprefix("moeblaze::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("moeblaze::")
    ]
    of_ranks = {"any_number", "experts_over_ranks_backward", "first_of_rank", "gather_rows", "most_tokens", "settled", "sized"}
    of_ranks |= {"apart", "arrived", "meet", "met", "row_numbers", "sum_parts", "sum_rows", "used_slots", "with_rows"}
    of_ranks |= {"expert_mlp_by_rank", "expert_down_backward_by_rank", "expert_up_backward_by_rank"}
    called_by_generated_code_alone = {"expert_weight_grad_or_add"}
    assert set(registered) - of_ranks - called_by_generated_code_alone == set(arguments())  # of_ranks: see tests/distributed
    assert sum(len(list(bad_operands(op))) for op in arguments()) > 120


@pytest.mark.parametrize("op", arguments())
def test_the_call_itself_is_right(op):
    call(op, arguments()[op])


@pytest.mark.parametrize("op", arguments())
def test_bad_operands(op):
    error = rf"(ValueError|TypeError|NotImplementedError): {op}: \w+ must .+, got .+"
    answers = {what: answer(op, given) for what, given in bad_operands(op)}
    assert not {what: said for what, said in answers.items() if not re.match(error, said)}

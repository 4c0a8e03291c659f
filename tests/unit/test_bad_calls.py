"""Every public function refuses what it cannot take by one sentence: ``<op>: <argument> must <rule>, got <value>``."""

import re

import numpy
import pytest
import torch
from torch import nn

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.arguments.validation_values import kind_of

T, K, E, D, F = 6, 2, 4, 8, 6


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def ids(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)


def arguments_of_moe():
    return {
        "x": zeros(T, D), "weights": zeros(T, K), "experts": ids(T, K), "w_up": zeros(E, 2 * F, D), "w_down": zeros(E, D, F),
    }  # fmt: skip


def moe(**changes):
    return moeblaze_ops.moe(**(arguments_of_moe() | changes))


def split(**changes):
    return moe(**({"w_up": zeros(E, F, D), "w_gate": zeros(E, F, D)} | changes))


def module(**changes):
    return moeblaze_ops.MoE(**({"D": D, "F": F, "E": E, "K": K} | changes))


def call_module(x, **changes):
    return module(**changes)(x)


def route(**changes):
    return moeblaze_ops.route(**({"logits": zeros(T, E), "top_k": K} | changes))


def rounding(**changes):
    arguments = {"weights": zeros(T, K), "experts": ids(T, K), "num_experts": E}
    return moeblaze_ops.round_routing(**(arguments | changes))


def estimate(**changes):
    return moeblaze_ops.memory_estimate(**({"T": T, "D": D, "F": F, "E": E, "K": K} | changes))


def dispatch(experts=None, num_experts=E):
    return torch.ops.moeblaze.dispatch(ids(T, K) if experts is None else experts, num_experts)


def accumulate(parameter, buffer=None):
    return moeblaze_ops.accumulate_grad(parameter, buffer)


def leaf(*shape, dtype=torch.float32):
    return zeros(*shape, dtype=dtype).requires_grad_()


def twice():
    parameter = leaf(3)
    moeblaze_ops.accumulate_grad(parameter)
    moeblaze_ops.accumulate_grad(parameter)


def sparse(*shape, dtype=torch.float32):
    return zeros(*shape, dtype=dtype).to_sparse()


class Text(str):
    """A string is what it says, of whatever class."""


def nested(*rows, layout=torch.strided):
    return torch.nested.nested_tensor([zeros(n, D) for n in rows], layout=layout)


def refused(call, op, kind, rows):
    """Calls with some arguments changed, what each raises, and how its text begins."""
    return [(lambda changes=changes: call(**changes), kind, f"{op}: {says}") for changes, says in rows]


GATED = "activation must take a gate"
POINTWISE = "activation must be a pointwise function of (gate, up), or of h alone"

# fmt: off
CALLS = [
    *refused(moe, "moe", TypeError, [
        ({"w_up": nn.ParameterList([zeros(2, 2)])}, "w_up must be a tensor, got a torch.nn"),
        ({"x": sparse(T, D)}, "x must be dense (to_dense()), got layout torch.sparse_coo"),
        ({"weights": sparse(T, K)}, "weights must be dense"),
        ({"experts": sparse(T, K, dtype=torch.int64)}, "experts must be dense"),
        ({"w_up": sparse(E, 2 * F, D)}, "w_up must be dense"),
        ({"w_down": sparse(E, D, F)}, "w_down must be dense"),
        ({"x": zeros(T, D).to_sparse_csr()}, "x must be dense"),
        ({"x": zeros(T, D).to_mkldnn()}, "x must be dense (to_dense()), got layout"),
        ({"x": nested(3, 3)}, "x must be dense (to_padded_tensor()), got a nested tensor"),
        ({"x": nested(3, 2, layout=torch.jagged)}, "x must be dense (to_dense()), got layout torch.jagged"),
        ({"x": ids(T, D)}, "x must be bfloat16, float16, float32 or (on CPU) float64, got"),
        ({"x": zeros(T, D, dtype=torch.bool)}, "x must be bfloat16"),
        ({"x": zeros(T, D, dtype=torch.complex64)}, "x must be bfloat16"),
        ({"x": zeros(T, D, dtype=torch.float8_e4m3fn)}, "x must be bfloat16"),
        ({"experts": zeros(T, K)}, "experts must be int32 or int64, got torch.float32"),
        ({"experts": zeros(T, K, dtype=torch.bool)}, "experts must be int32 or int64"),
        ({"experts": ids(T, K, dtype=torch.uint8)}, "experts must be int32 or int64"),
        ({"experts": ids(T, K, dtype=torch.int16)}, "experts must be int32 or int64"),
        ({"weights": zeros(T, K, dtype=torch.float16)}, "weights must be float32 or torch.float32, the dtype of x"),
        ({"weights": ids(T, K)}, "weights must be float32 or"),
        ({"w_up": zeros(E, 2 * F, D, dtype=torch.bfloat16)}, "w_up must have the dtype torch.float32 of x, got torch.bfloat16"),
        ({"w_down": zeros(E, D, F, dtype=torch.float64)}, "w_down must have the dtype torch.float32 of x"),
        ({"b_up": zeros(E, 2 * F, dtype=torch.bfloat16)}, "b_up must have the dtype"),
        ({"b_down": ids(E, D)}, "b_down must have the dtype"),
        ({"activation": None}, "activation must be one of"),
        ({"activation": ["swiglu"]}, "activation must be one of"),
        ({"weight_on": True}, "weight_on must be one of output, input, got True"),
        ({"keep": False}, "keep must be one of preactivation, h8, input, auto, got False"),
        ({"interleaved": 1}, "interleaved must be True or False, got 1"),
        ({"transposed": "yes"}, "transposed must be True or False, got 'yes'"),
    ]),
    *refused(moe, "moe", ValueError, [
        ({"x": zeros(T, D, device="meta")}, "weights must be on meta like x, got cpu"),
        ({"x": zeros()}, "x must have shape [..., D], got shape []"),
        ({"x": zeros(T, 0)}, "x must have shape [..., D], got shape [6, 0]"),
        ({"x": zeros(T, D + 1)}, "w_up must have size D=9 of x on axis 2, got shape"),
        ({"x": zeros(T + 1, D)}, "weights must have leading shape [7] of x, got [6, 2]"),
        ({"x": zeros(2, 3, D)}, "weights must have 3 dimensions, as x has"),
        ({"weights": zeros(T)}, "weights must have 2 dimensions, as x has"),
        ({"experts": ids(T)}, "experts must have shape [6, 2] of weights, got [6]"),
        ({"experts": ids(T, 3)}, "experts must have shape [6, 2] of weights"),
        ({"weights": zeros(T, 0), "experts": ids(T, 0)}, "experts must have 1 id per token or more, got"),
        ({"weights": zeros(T, 5), "experts": ids(T, 5)}, "experts must have at most E=4 ids per token"),
        ({"w_up": zeros(E, D)}, "w_up must have 3 dimensions, got shape [4, 8]"),
        ({"w_up": zeros(E, 2, F, D)}, "w_up must have 3 dimensions"),
        ({"w_down": zeros(D, F)}, "w_down must have 3 dimensions"),
        ({"w_up": zeros(0, 2 * F, D), "w_down": zeros(0, D, F)}, "w_up must have 1 to 4096 experts on axis 0"),
        ({"w_up": zeros(4097, 2, D), "w_down": zeros(4097, D, 1)}, "w_up must have 1 to 4096 experts"),
        ({"w_up": zeros(E, 3, D)}, "w_up must pack gate and up in an even number of outputs, got 3"),
        ({"w_up": zeros(E, 0, D)}, "w_up must pack gate and up in an even number"),
        ({"activation": "relu", "w_up": zeros(E, 0, D)}, "w_up must have 1 output or more, got 0"),
        ({"w_up": zeros(E, F, D)}, "w_down must have shape [4, 8, 3] ([E, D, F]; F is half the outputs of w_up, for 'swiglu')"),
        ({"activation": torch.nn.functional.silu}, f"{GATED} where w_up packs gate and up: silu takes one argument, with a gate"),
        ({"activation": "sigmoid(h) * 2"}, f"{GATED} where w_up packs gate and up: sigmoid(h) * 2 takes one argument, with a"),
        ({"activation": "relu", "w_down": zeros(E, D, 7)}, "w_down must have shape [4, 8, 12] ([E, D, F]; F is the outputs of"),
        ({"w_down": zeros(E, D + 1, F)}, "w_down must have shape [4, 8, 6] ([E, D, F]"),
        ({"w_down": zeros(E, D, F + 1)}, "w_down must have shape [4, 8, 6]"),
        ({"w_down": zeros(E + 1, D, F)}, "w_down must have shape [4, 8, 6]"),
        ({"w_down": zeros(E, F, D)}, "w_down must have shape [4, 8, 6]"),
        ({"w_up": zeros(E, D, 2 * F)}, "w_up must have size D=8 of x on axis 2, got shape [4, 8, 12]"),
        ({"transposed": True}, "w_up must have size D=8 of x on axis 1, got shape [4, 12, 8]"),
        ({"transposed": True, "w_up": zeros(E, D, 2 * F)}, "w_down must have shape [4, 6, 8] ([E, F, D]"),
        ({"b_up": zeros(2 * F)}, "b_up must have shape [4, 12], got shape [12]"),
        ({"b_up": zeros(E, 2 * F - 1)}, "b_up must have shape [4, 12], got shape [4, 11]"),
        ({"b_up": zeros(E, F)}, "b_up must have shape [4, 12], got shape [4, 6]"),
        ({"b_up": zeros(E, 2, F)}, "b_up must have shape [4, 12]"),
        ({"b_down": zeros(D)}, "b_down must have shape [4, 8], got shape [8]"),
        ({"b_down": zeros(E, F)}, "b_down must have shape [4, 8], got shape [4, 6]"),
        ({"b_gate": zeros(E, F)}, "b_gate must come with w_gate"),
        ({"activation": "swish"}, "activation must be one of swiglu, geglu, "),
        ({"activation": lambda gate, up: gate.softmax(-1) * up}, f"{POINTWISE}, got "),
        ({"activation": "identity"}, "activation must be one of"),
        ({"weight_on": "both"}, "weight_on must be one of output, input, got 'both'"),
        ({"keep": "all"}, "keep must be one of preactivation, h8, input, auto, got 'all'"),
    ]),
    *refused(split, "moe", TypeError, [
        ({"w_gate": zeros(E, F, D, dtype=torch.float16)}, "w_gate must have the dtype"),
    ]),
    *refused(split, "moe", ValueError, [
        ({"w_gate": zeros(F, D)}, "w_gate must have 3 dimensions"),
        ({"w_gate": zeros(E, F + 1, D)}, "w_gate must have shape [4, 6, 8] of w_up, got shape [4, 7, 8]"),
        ({"w_gate": zeros(1, F, D)}, "w_gate must have shape [4, 6, 8] of w_up"),
        ({"b_gate": zeros(E, F), "b_up": zeros(E, 2 * F)}, "b_up must have shape [4, 6], got shape [4, 12]"),
        ({"b_gate": zeros(F), "b_up": zeros(E, F)}, "b_gate must have shape [4, 6]"),
        ({"b_up": zeros(E, F)}, "b_gate must be given exactly when b_up is, got None"),
        ({"b_gate": zeros(E, F)}, "b_gate must be given exactly when b_up is"),
        ({"activation": "relu"}, f"{GATED} where w_gate is given: relu takes one argument, with a gate use reglu, got 'relu'"),
        ({"interleaved": True}, "interleaved must be False when w_gate is given, got True"),
    ]),
    *refused(module, "MoE", ValueError, [
        ({"D": 0}, "D must be at least 1"),
        ({"D": -8}, "D must be at least 1"),
        ({"F": 0}, "F must be at least 1"),
        ({"E": 0}, "E must be between 1 and 4096"),
        ({"E": 4097}, "E must be between 1 and 4096"),
        ({"K": 0}, "K must be between 1 and 4 (the experts, and at most 32)"),
        ({"K": 5}, "K must be between 1 and 4 (the experts, and at most 32)"),
        ({"K": -1}, "K must be between 1 and 4 (the experts"),
        ({"keep": "all"}, "keep must be one of preactivation, h8, input, auto"),
        ({"device": "gpu"}, "device must be a device or its name"),
        ({"activation": "swish"}, "activation must be one of swiglu, "),
        ({"activation": nn.PReLU()}, f"{POINTWISE}, got PReLU: it reads a tensor"),
        ({"E": 64, "K": 33}, "K must be between 1 and 32 (the experts, and at most 32)"),
    ]),
    *refused(module, "MoE", TypeError, [
        ({"D": 8.0}, "D must be an int"),
        ({"D": None}, "D must be an int"),
        ({"D": True}, "D must be an int"),
        ({"D": "8"}, "D must be an int"),
        ({"F": 6.5}, "F must be an int"),
        ({"E": 4.0}, "E must be an int"),
        ({"K": 2.0}, "K must be an int"),
        ({"bias": 1}, "bias must be True or False"),
        ({"bias": None}, "bias must be True or False"),
        ({"renormalize": "no"}, "renormalize must be True or False"),
        ({"keep": 3}, "keep must be one of preactivation, h8, input, auto"),
        ({"device": 1.5}, "device must be a device or its name"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype"),
        ({"dtype": torch.int64}, "dtype must be bfloat16, float16, float32 or float64"),
    ]),
    *refused(call_module, "MoE", TypeError, [
        ({"x": None}, "x must be a tensor, got None"),
        ({"x": numpy.zeros((T, D))}, "x must be a tensor, got a numpy.ndarray"),
        ({"x": ids(T, D)}, "x must be bfloat16, float16, float32"),
        ({"x": sparse(T, D)}, "x must be dense"),
        ({"x": zeros(T, D), "dtype": torch.bfloat16}, "x must have the dtype torch.bfloat16 of w_up, got torch.float32"),
    ]),
    *refused(call_module, "MoE", ValueError, [
        ({"x": zeros(T, D - 1)}, "x must have last size D=8, got shape [6, 7]"),
        ({"x": zeros()}, "x must have shape [..., D], got shape []"),
        ({"x": zeros(T, D), "device": "meta"}, "x must be on meta like w_up, got cpu"),
    ]),
    *refused(route, "route", TypeError, [
        ({"logits": sparse(T, E)}, "logits must be dense"),
        ({"logits": ids(T, E)}, "logits_TE must be bfloat16, float16, float32"),
        ({"top_k": 2.0}, "top_k must be an int, got 2.0"),
        ({"top_k": torch.tensor(2)}, "top_k must be an int, got a tensor of shape []"),
        ({"top_k": None}, "top_k must be an int, got None"),
        ({"bias": [0.0] * E}, "bias must be a tensor, got a list"),
        ({"bias": ids(E)}, "bias_E must be float32 or torch.float32"),
        ({"scoring": torch.sigmoid}, "scoring must be one of softmax, "),
        ({"renormalize": 1}, "renormalize must be True or False, got 1"),
        ({"scale": "2"}, "scale must be a number, got '2'"),
        ({"scale": torch.ones(())}, "scale must be a number, got a tensor"),
        ({"num_groups": 2.0}, "num_groups must be an int, got 2.0"),
        ({"top_groups": "1"}, "top_groups must be an int, got '1'"),
    ]),
    *refused(route, "route", ValueError, [
        ({"logits": zeros()}, "logits must have shape [..., E], got shape []"),
        ({"logits": zeros(T, 0)}, "logits must have shape [..., E], got shape [6, 0]"),
        ({"logits": zeros(1, 4097)}, "logits_TE must have 1 to 4096 experts"),
        ({"top_k": 0}, "top_k must be between 1 and 4 (the experts, and at most 32), got 0"),
        ({"top_k": 5}, "top_k must be between 1 and 4"),
        ({"bias": zeros(E + 1)}, "bias_E must have shape [4] (experts of logits_TE)"),
        ({"bias": zeros(E, device="meta")}, "bias_E must be on cpu like logits_TE"),
        ({"scoring": "relu"}, "scoring must be one of softmax, softmax_topk, sigmoid"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0.0"),
        ({"scale": float("nan")}, "scale must be positive and finite, got nan"),
        ({"num_groups": 3}, "num_groups must divide the 4 experts, got 3"),
        ({"num_groups": 0}, "num_groups must divide the 4 experts, got 0"),
        ({"top_groups": 2}, "top_groups must be between 1 and num_groups=1, got 2"),
        ({"logits": zeros(T, 8), "top_k": 3, "num_groups": 4, "top_groups": 1}, "top_k must be at most 2"),
    ]),
    *refused(rounding, "round_routing", ValueError, [
        ({"num_experts": 0}, "num_experts must be between 1 and 4096"),
        ({"spare": K}, "spare must be between 0 and 1, the slots less one, got 2"),
        ({"spare": -1}, "spare must be between 0 and 1"),
        ({"tile": 0}, "tile must be at least 1, got 0"),
        ({"mode": "closest"}, "mode must be one of nearest, up, down, got 'closest'"),
        ({"weights": zeros()}, "weights must have shape [..., K"),
        ({"weights": zeros(T, 0)}, "weights must have shape [..., K"),
        ({"experts": ids(T, K + 1)}, "experts must have shape [6, 2] (that of weights), got shape [6, 3]"),
        ({"experts": ids(T, K).to("meta")}, "experts must be on cpu (as weights), got meta"),
    ]),
    *refused(rounding, "round_routing", TypeError, [
        ({"num_experts": 4.0}, "num_experts must be an int"),
        ({"spare": True}, "spare must be an int"),
        ({"tile": 128.0}, "tile must be an int"),
        ({"mode": None}, "mode must be one of nearest, up, down"),
        ({"weights": ids(T, K)}, "weights must be bfloat16"),
        ({"experts": zeros(T, K)}, "experts must be int32 or int64"),
    ]),
    *refused(estimate, "memory_estimate", ValueError, [
        ({"device": "cuda:77"}, f"device must be a GPU that is here (of {torch.cuda.device_count()}), got 'cuda:77'"),
        ({"T": -1}, "T must be at least 0"),
        ({"D": 0}, "D must be at least 1"),
        ({"D": -8}, "D must be at least 1"),
        ({"F": 0}, "F must be at least 1"),
        ({"E": 0}, "E must be between 1 and 4096"),
        ({"E": -4}, "E must be between 1 and 4096"),
        ({"K": 0}, "K must be between 1 and 4, the experts"),
        ({"K": 5}, "K must be between 1 and 4, the experts"),
        ({"keep": "all"}, "keep must be one of preactivation, h8, input, auto"),
        ({"device": "gpu"}, "device must be a device or its name"),
    ]),
    *refused(estimate, "memory_estimate", TypeError, [
        ({"T": 6.0}, "T must be an int"),
        ({"T": None}, "T must be an int"),
        ({"D": 8.5}, "D must be an int"),
        ({"F": 1e3}, "F must be an int"),
        ({"K": True}, "K must be an int"),
        ({"keep": 1}, "keep must be one of preactivation, h8, input, auto"),
        ({"dtype": "bf16"}, "dtype must be a torch.dtype"),
        ({"dtype": torch.int8}, "dtype must be bfloat16, float16, float32 or float64"),
        ({"gated": 2}, "gated must be True or False"),
        ({"bias": None}, "bias must be True or False"),
        ({"router": "yes"}, "router must be True or False"),
        ({"compiled": 0}, "compiled must be True or False"),
        ({"device": 3.5}, "device must be a device or its name"),
    ]),
    *refused(accumulate, "accumulate_grad", TypeError, [
        ({"parameter": [1]}, "parameter must be a tensor, got a list"),
        ({"parameter": leaf(3), "buffer": [0.0]}, "buffer must be a tensor, got a list"),
        ({"parameter": leaf(3), "buffer": ids(3)}, "buffer must be float32 or torch.float32"),
        ({"parameter": leaf(3), "buffer": sparse(3)}, "buffer must be dense"),
    ]),
    *refused(accumulate, "accumulate_grad", ValueError, [
        ({"parameter": leaf(3) * 2}, "parameter must be a leaf that requires gradients"),
        ({"parameter": zeros(3)}, "parameter must be a leaf"),
        ({"parameter": leaf(3), "buffer": zeros(4)}, "buffer must have shape [3] of the parameter"),
        ({"parameter": leaf(3), "buffer": leaf(3)}, "buffer must not require gradients"),
    ]),
    *refused(dispatch, "dispatch", ValueError, [
        ({"experts": ids(T)}, "experts_TK must have 2 dimensions [T, K], got shape [6]"),
        ({"num_experts": 0}, "num_experts must be between 1 and 4096, got 0"),
        ({"experts": ids(T, 0)}, "experts_TK must have 1 column or more, got 0"),
    ]),
    *refused(dispatch, "dispatch", TypeError, [
        ({"experts": zeros(T, K)}, "experts_TK must be int32 or int64, got torch.float32"),
        ({"experts": ids(T, K).to_sparse()}, "experts_TK must be dense (to_dense()), got layout torch.sparse_coo"),
        ({"experts": torch.nested.nested_tensor([ids(3, K), ids(2, K)])}, "experts_TK must be dense"),
    ]),
    *(
        (lambda call=call, name=name, value=value: call(**{name: value}), TypeError, f"{op}: {name} must be a tensor")
        for call, op, names in (
            (moe, "moe", ("x", "weights", "experts", "w_up", "w_down")),
            (split, "moe", ("w_gate", "b_up", "b_gate", "b_down")),
            (route, "route", ("logits",)),
            (rounding, "round_routing", ("weights", "experts")),
        )
        for name in names
        for value in (None, [[0.0]], 1.5, numpy.zeros((T, D)), "x")
        if value is not None or call is not split
    ),
    *(
        (lambda name=name, value=value: moe(**{name: value.to("meta")}), ValueError, f"moe: {name} must be on cpu like x, got")
        for name, value in {**arguments_of_moe(), "b_up": zeros(E, 2 * F), "b_down": zeros(E, D)}.items()
        if name != "x"
    ),
    *(
        (run, NotImplementedError, f"{op}: torch.jit.{how} is not supported, use")
        for run, op, how in (
            (lambda: torch.jit.trace(lambda x: moe(x=x), (zeros(T, D),)), "moe", "trace"),
            (lambda: torch.jit.script(moeblaze_ops.moe), "moe", "script"),
            (lambda: torch.jit.trace(module(), (zeros(T, D),)), "MoE", "trace"),
            (lambda: torch.jit.script(module()), "MoE", "script"),
            (lambda: torch.jit.trace(lambda x: route(logits=x), (zeros(T, E),)), "route", "trace"),
            (lambda: torch.jit.script(moeblaze_ops.route), "route", "script"),
            (lambda: torch.jit.script(moeblaze_ops.round_routing), "round_routing", "script"),
        )
    ),
    *(
        (
            lambda op=op, model=model: getattr(moeblaze_ops, op)(model, zeros(T, D)),
            TypeError,
            f"{op}: model must be a module or a function, got {got}",
        )
        for op in ("explain", "verify")
        for model, got in (
            *((model, kind_of(model)) for model in (None, "model", [1], 3, torch.zeros(1))),
            (moeblaze_ops.MoE, "the class MoE: make one of it first"),
        )
    ),
    (
        lambda: moeblaze_ops.verify(module(), torch.empty(T, D, device="meta")),
        ValueError,
        "verify: model must have numbers, as its inputs (explain does without), got tensors on the meta device",
    ),
    (
        lambda: moeblaze_ops.shard_experts(module(), None),
        TypeError,
        "shard_experts: mesh must be a DeviceMesh of one axis, such as init_device_mesh(...)['ep'], got None",
    ),
    (
        lambda: moeblaze_ops.shard_experts("model", None),
        TypeError,
        "shard_experts: model must be an nn.Module, got 'model'",
    ),
    (twice, ValueError, "accumulate_grad: parameter must accumulate once"),
]
# fmt: on


def check(call, kind, message, run=lambda call: call()):
    with pytest.raises(kind) as raised:
        run(call)
    assert type(raised.value) is kind
    assert str(raised.value).startswith(message), str(raised.value)
    assert re.fullmatch(r"\w+: [\w.]+ (must .+, got .+|is not supported, use .+)", str(raised.value), re.DOTALL)


def test_the_table_is_large():
    assert len(CALLS) >= 250


@pytest.mark.parametrize(("call", "kind", "message"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_calls(call, kind, message):
    check(call, kind, message)


COMPILED = (
    "moe: x must be a tensor", "moe: w_up must be a tensor", "moe: b_up must be a tensor", "moe: x must be bfloat16, ",
    "moe: experts must be int32 or int64, got", "moe: w_up must have the dtype", "moe: w_up must have size D=9",
    "moe: weights must have leading shape", "moe: w_down must have shape [4, 8, 3]", "moe: experts must have at most",
    "moe: b_up must have shape [4, 12], got shape [4, 11]", "moe: activation must be one of swiglu, ", "moe: keep must be one of",
    "moe: interleaved must be True or False", "MoE: x must have last size", "MoE: x must be bfloat16",
    "route: top_k must be between 1 and 4", "route: scoring must be one of softmax, ", "route: logits must have shape",
)  # fmt: skip


@pytest.mark.parametrize("message", COMPILED)
def test_bad_calls_while_compiling(message):
    """The frame is left to Python where it raises, as Dynamo leaves every frame that raises."""
    if message.startswith("route: scoring") and torch.__version__ < "2.12":
        pytest.skip("Dynamo asks builtin functions for their module wrongly")
    torch._dynamo.reset()
    case = next(case for case in CALLS if case[2].startswith(message))
    check(*case, run=lambda call: torch.compile(call, backend="eager")())


def test_a_good_call_is_none_of_these():
    x = torch.randn(T, D)
    layer = module(bias=True)
    assert layer(x).shape == (T, D)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert moe(w_up=zeros(E, 2 * F, D, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert split(b_gate=zeros(E, F), b_up=zeros(E, F), activation=Text("geglu")).shape == (T, D)
    assert moe(x=zeros(0, D), weights=zeros(0, K), experts=ids(0, K)).shape == (0, D)
    assert moe(x=zeros(D), weights=zeros(K), experts=ids(K)).shape == (D,)
    assert estimate(T=0).kept >= 0


@pytest.mark.parametrize("keep", ["auto", None])
def test_memory_estimate_takes_every_keep(monkeypatch, keep):
    from moeblaze_ops.memory import estimate as memory

    monkeypatch.setattr(memory, "free_bytes", lambda device: 10_000_000)
    monkeypatch.setattr(config, "keep", "auto")
    few, many = estimate(T=10, keep=keep), estimate(T=1_000_000, keep=keep)
    assert few == estimate(T=10, keep="preactivation") and "h" in few.buffers
    assert many == estimate(T=1_000_000, keep="input") and "h" not in many.buffers
    assert not memory.recent_choices(), "an estimate decides for no layer"

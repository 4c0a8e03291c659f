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


def moe(**changes):
    arguments = {
        "x": zeros(T, D), "weights": zeros(T, K), "experts": ids(T, K), "w_up": zeros(E, 2 * F, D), "w_down": zeros(E, D, F),
    }  # fmt: skip
    return moeblaze_ops.moe(**(arguments | changes))


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


NO_TENSOR = {"none": None, "list": [[0.0]], "number": 1.5, "numpy": numpy.zeros((T, D)), "text": "x"}

CALLS = {
    # moe: what is no tensor
    **{f"moe x {k}": (lambda v=v: moe(x=v), TypeError, "moe: x must be a tensor") for k, v in NO_TENSOR.items()},
    **{
        f"moe {name} {k}": (lambda name=name, v=v: moe(**{name: v}), TypeError, f"moe: {name} must be a tensor")
        for name in ("weights", "experts", "w_up", "w_down")
        for k, v in NO_TENSOR.items()
    },
    **{
        f"moe {name} {k}": (lambda name=name, v=v: split(**{name: v}), TypeError, f"moe: {name} must be a tensor")
        for name in ("w_gate", "b_up", "b_gate", "b_down")
        for k, v in NO_TENSOR.items()
        if v is not None
    },
    "moe list of parameters": (
        lambda: moe(w_up=nn.ParameterList([zeros(2, 2)])),
        TypeError,
        "moe: w_up must be a tensor, got a torch.nn",
    ),
    # moe: tensors without strides
    "moe sparse x": (lambda: moe(x=sparse(T, D)), TypeError, "moe: x must be dense (to_dense()), got layout torch.sparse_coo"),
    "moe sparse weights": (lambda: moe(weights=sparse(T, K)), TypeError, "moe: weights must be dense"),
    "moe sparse experts": (lambda: moe(experts=sparse(T, K, dtype=torch.int64)), TypeError, "moe: experts must be dense"),
    "moe sparse w_up": (lambda: moe(w_up=sparse(E, 2 * F, D)), TypeError, "moe: w_up must be dense"),
    "moe sparse w_down": (lambda: moe(w_down=sparse(E, D, F)), TypeError, "moe: w_down must be dense"),
    "moe csr x": (lambda: moe(x=zeros(T, D).to_sparse_csr()), TypeError, "moe: x must be dense"),
    "moe mkldnn x": (lambda: moe(x=zeros(T, D).to_mkldnn()), TypeError, "moe: x must be dense (to_dense()), got layout"),
    "moe nested x": (
        lambda: moe(x=torch.nested.nested_tensor([zeros(3, D), zeros(3, D)])),
        TypeError,
        "moe: x must be dense (to_padded_tensor()), got a nested tensor",
    ),
    "moe jagged x": (
        lambda: moe(x=torch.nested.nested_tensor([zeros(3, D), zeros(2, D)], layout=torch.jagged)),
        TypeError,
        "moe: x must be dense (to_dense()), got layout torch.jagged",
    ),
    # moe: dtypes
    "moe integer x": (lambda: moe(x=ids(T, D)), TypeError, "moe: x must be bfloat16, float16, float32 or (on CPU) float64, got"),
    "moe bool x": (lambda: moe(x=zeros(T, D, dtype=torch.bool)), TypeError, "moe: x must be bfloat16"),
    "moe complex x": (lambda: moe(x=zeros(T, D, dtype=torch.complex64)), TypeError, "moe: x must be bfloat16"),
    "moe float8 x": (lambda: moe(x=zeros(T, D, dtype=torch.float8_e4m3fn)), TypeError, "moe: x must be bfloat16"),
    "moe float experts": (
        lambda: moe(experts=zeros(T, K)),
        TypeError,
        "moe: experts must be int32 or int64, got torch.float32",
    ),
    "moe bool experts": (lambda: moe(experts=zeros(T, K, dtype=torch.bool)), TypeError, "moe: experts must be int32 or int64"),
    "moe uint8 experts": (lambda: moe(experts=ids(T, K, dtype=torch.uint8)), TypeError, "moe: experts must be int32 or int64"),
    "moe int16 experts": (lambda: moe(experts=ids(T, K, dtype=torch.int16)), TypeError, "moe: experts must be int32 or int64"),
    "moe half weights": (
        lambda: moe(weights=zeros(T, K, dtype=torch.float16)),
        TypeError,
        "moe: weights must be float32 or torch.float32, the dtype of x",
    ),
    "moe integer weights": (lambda: moe(weights=ids(T, K)), TypeError, "moe: weights must be float32 or"),
    "moe w_up of another dtype": (
        lambda: moe(w_up=zeros(E, 2 * F, D, dtype=torch.bfloat16)),
        TypeError,
        "moe: w_up must have the dtype torch.float32 of x, got torch.bfloat16",
    ),
    "moe w_down of another dtype": (
        lambda: moe(w_down=zeros(E, D, F, dtype=torch.float64)),
        TypeError,
        "moe: w_down must have the dtype torch.float32 of x",
    ),
    "moe w_gate of another dtype": (
        lambda: split(w_gate=zeros(E, F, D, dtype=torch.float16)),
        TypeError,
        "moe: w_gate must have the dtype",
    ),
    "moe b_up of another dtype": (
        lambda: moe(b_up=zeros(E, 2 * F, dtype=torch.bfloat16)),
        TypeError,
        "moe: b_up must have the dtype",
    ),
    "moe b_down of another dtype": (lambda: moe(b_down=ids(E, D)), TypeError, "moe: b_down must have the dtype"),
    # moe: devices
    **{
        f"moe meta {name}": (
            lambda name=name, v=v: moe(**{name: v.to("meta")}),
            ValueError,
            f"moe: {name} must be on cpu like x, got meta",
        )
        for name, v in {
            "weights": zeros(T, K),
            "experts": ids(T, K),
            "w_up": zeros(E, 2 * F, D),
            "w_down": zeros(E, D, F),
            "b_up": zeros(E, 2 * F),
            "b_down": zeros(E, D),
        }.items()
    },
    "moe meta x": (lambda: moe(x=zeros(T, D, device="meta")), ValueError, "moe: weights must be on meta like x, got cpu"),
    # moe: shapes
    "moe x of no axis": (lambda: moe(x=zeros()), ValueError, "moe: x must have shape [..., D], got shape []"),
    "moe x of no width": (lambda: moe(x=zeros(T, 0)), ValueError, "moe: x must have shape [..., D], got shape [6, 0]"),
    "moe x wider": (lambda: moe(x=zeros(T, D + 1)), ValueError, "moe: w_up must have size D=9 of x on axis 2, got shape"),
    "moe x longer": (lambda: moe(x=zeros(T + 1, D)), ValueError, "moe: weights must have leading shape [7] of x, got [6, 2]"),
    "moe x of 3 axes": (lambda: moe(x=zeros(2, 3, D)), ValueError, "moe: weights must have 3 dimensions, as x has"),
    "moe weights of one axis": (lambda: moe(weights=zeros(T)), ValueError, "moe: weights must have 2 dimensions, as x has"),
    "moe experts of one axis": (
        lambda: moe(experts=ids(T)),
        ValueError,
        "moe: experts must have shape [6, 2] of weights, got [6]",
    ),
    "moe experts more": (lambda: moe(experts=ids(T, 3)), ValueError, "moe: experts must have shape [6, 2] of weights"),
    "moe no choice": (
        lambda: moe(weights=zeros(T, 0), experts=ids(T, 0)),
        ValueError,
        "moe: experts must have 1 id per token or more, got",
    ),
    "moe K > E": (
        lambda: moe(weights=zeros(T, 5), experts=ids(T, 5)),
        ValueError,
        "moe: experts must have at most E=4 ids per token",
    ),
    "moe w_up of 2 axes": (lambda: moe(w_up=zeros(E, D)), ValueError, "moe: w_up must have 3 dimensions, got shape [4, 8]"),
    "moe w_up of 4 axes": (lambda: moe(w_up=zeros(E, 2, F, D)), ValueError, "moe: w_up must have 3 dimensions"),
    "moe w_down of 2 axes": (lambda: moe(w_down=zeros(D, F)), ValueError, "moe: w_down must have 3 dimensions"),
    "moe w_gate of 2 axes": (lambda: split(w_gate=zeros(F, D)), ValueError, "moe: w_gate must have 3 dimensions"),
    "moe no experts": (
        lambda: moe(w_up=zeros(0, 2 * F, D), w_down=zeros(0, D, F)),
        ValueError,
        "moe: w_up must have 1 to 4096 experts on axis 0",
    ),
    "moe too many experts": (
        lambda: moe(w_up=zeros(4097, 2, D), w_down=zeros(4097, D, 1)),
        ValueError,
        "moe: w_up must have 1 to 4096 experts",
    ),
    "moe odd packed width": (
        lambda: moe(w_up=zeros(E, 3, D)),
        ValueError,
        "moe: w_up must pack gate and up in an even number of outputs, got 3",
    ),
    "moe no width": (lambda: moe(w_up=zeros(E, 0, D)), ValueError, "moe: w_up must pack gate and up in an even number"),
    "moe no ungated width": (
        lambda: moe(activation="relu", w_up=zeros(E, 0, D)),
        ValueError,
        "moe: w_up must have 1 output or more, got 0",
    ),
    "moe half the up width": (
        lambda: moe(w_up=zeros(E, F, D)),
        ValueError,
        "moe: w_down must have shape [4, 8, 3] ([E, D, F]; F is half the outputs of w_up, for 'swiglu'), got shape [4, 8, 6]",
    ),
    "moe packed for an ungated activation": (
        lambda: moe(activation=torch.nn.functional.silu),
        ValueError,
        "moe: activation must take a gate where w_up packs gate and up: silu takes one argument, with a gate use swiglu",
    ),
    "moe packed for an ungated formula": (
        lambda: moe(activation="sigmoid(h) * 2"),
        ValueError,
        "moe: activation must take a gate where w_up packs gate and up: sigmoid(h) * 2 takes one argument, with a gate use a",
    ),
    "moe w_down of another F, ungated": (
        lambda: moe(activation="relu", w_down=zeros(E, D, F + 1)),
        ValueError,
        "moe: w_down must have shape [4, 8, 12] ([E, D, F]; F is the outputs of w_up)",
    ),
    "moe w_down of another D": (
        lambda: moe(w_down=zeros(E, D + 1, F)),
        ValueError,
        "moe: w_down must have shape [4, 8, 6] ([E, D, F]",
    ),
    "moe w_down of another F": (lambda: moe(w_down=zeros(E, D, F + 1)), ValueError, "moe: w_down must have shape [4, 8, 6]"),
    "moe w_down of another E": (lambda: moe(w_down=zeros(E + 1, D, F)), ValueError, "moe: w_down must have shape [4, 8, 6]"),
    "moe w_down the other way round": (lambda: moe(w_down=zeros(E, F, D)), ValueError, "moe: w_down must have shape [4, 8, 6]"),
    "moe w_up the other way round": (
        lambda: moe(w_up=zeros(E, D, 2 * F)),
        ValueError,
        "moe: w_up must have size D=8 of x on axis 2, got shape [4, 8, 12]",
    ),
    "moe transposed w_up as it was": (
        lambda: moe(transposed=True),
        ValueError,
        "moe: w_up must have size D=8 of x on axis 1, got shape [4, 12, 8]",
    ),
    "moe transposed w_down as it was": (
        lambda: moe(transposed=True, w_up=zeros(E, D, 2 * F)),
        ValueError,
        "moe: w_down must have shape [4, 6, 8] ([E, F, D]",
    ),
    "moe w_gate of another width": (
        lambda: split(w_gate=zeros(E, F + 1, D)),
        ValueError,
        "moe: w_gate must have shape [4, 6, 8] of w_up, got shape [4, 7, 8]",
    ),
    "moe w_gate of another E": (
        lambda: split(w_gate=zeros(1, F, D)),
        ValueError,
        "moe: w_gate must have shape [4, 6, 8] of w_up",
    ),
    "moe b_up of one axis": (lambda: moe(b_up=zeros(2 * F)), ValueError, "moe: b_up must have shape [4, 12], got shape [12]"),
    "moe odd b_up": (lambda: moe(b_up=zeros(E, 2 * F - 1)), ValueError, "moe: b_up must have shape [4, 12], got shape [4, 11]"),
    "moe half b_up": (lambda: moe(b_up=zeros(E, F)), ValueError, "moe: b_up must have shape [4, 12], got shape [4, 6]"),
    "moe b_up of 3 axes": (lambda: moe(b_up=zeros(E, 2, F)), ValueError, "moe: b_up must have shape [4, 12]"),
    "moe split b_up": (
        lambda: split(b_gate=zeros(E, F), b_up=zeros(E, 2 * F)),
        ValueError,
        "moe: b_up must have shape [4, 6], got shape [4, 12]",
    ),
    "moe b_gate of one axis": (
        lambda: split(b_gate=zeros(F), b_up=zeros(E, F)),
        ValueError,
        "moe: b_gate must have shape [4, 6]",
    ),
    "moe b_down of one axis": (lambda: moe(b_down=zeros(D)), ValueError, "moe: b_down must have shape [4, 8], got shape [8]"),
    "moe b_down of another D": (
        lambda: moe(b_down=zeros(E, F)),
        ValueError,
        "moe: b_down must have shape [4, 8], got shape [4, 6]",
    ),
    # moe: what goes together
    "moe b_gate alone": (lambda: moe(b_gate=zeros(E, F)), ValueError, "moe: b_gate must come with w_gate"),
    "moe b_up without b_gate": (
        lambda: split(b_up=zeros(E, F)),
        ValueError,
        "moe: b_gate must be given exactly when b_up is, got None",
    ),
    "moe b_gate without b_up": (lambda: split(b_gate=zeros(E, F)), ValueError, "moe: b_gate must be given exactly when b_up is"),
    "moe w_gate without a gate": (
        lambda: split(activation="relu"),
        ValueError,
        "moe: activation must take a gate where w_gate is given: relu takes one argument, with a gate use reglu, got 'relu'",
    ),
    "moe interleaved apart": (
        lambda: split(interleaved=True),
        ValueError,
        "moe: interleaved must be False when w_gate is given, got True",
    ),
    # moe: options
    "moe unknown activation": (lambda: moe(activation="swish"), ValueError, "moe: activation must be one of swiglu, geglu, "),
    "moe activation function": (
        lambda: moe(activation=lambda gate, up: gate.softmax(-1) * up),
        ValueError,
        "moe: activation must be a pointwise function of (gate, up), or of h alone, got ",
    ),
    "moe no activation": (lambda: moe(activation=None), TypeError, "moe: activation must be one of"),
    "moe activation list": (lambda: moe(activation=["swiglu"]), TypeError, "moe: activation must be one of"),
    "moe identity": (lambda: moe(activation="identity"), ValueError, "moe: activation must be one of"),
    "moe weight_on": (lambda: moe(weight_on="both"), ValueError, "moe: weight_on must be one of output, input, got 'both'"),
    "moe weight_on bool": (lambda: moe(weight_on=True), TypeError, "moe: weight_on must be one of output, input, got True"),
    "moe keep": (lambda: moe(keep="all"), ValueError, "moe: keep must be one of preactivation, h8, input, auto, got 'all'"),
    "moe keep bool": (lambda: moe(keep=False), TypeError, "moe: keep must be one of preactivation, h8, input, auto, got False"),
    "moe interleaved": (lambda: moe(interleaved=1), TypeError, "moe: interleaved must be True or False, got 1"),
    "moe transposed": (lambda: moe(transposed="yes"), TypeError, "moe: transposed must be True or False, got 'yes'"),
    "moe traced": (
        lambda: torch.jit.trace(lambda x: moe(x=x), (zeros(T, D),)),
        NotImplementedError,
        "moe: torch.jit.trace is not supported, use",
    ),
    "moe scripted": (
        lambda: torch.jit.script(moeblaze_ops.moe),
        NotImplementedError,
        "moe: torch.jit.script is not supported, use",
    ),
    # MoE
    **{
        f"MoE {name} {v!r}": (lambda name=name, v=v: module(**{name: v}), kind, f"MoE: {name} must be {rule}")
        for name, v, kind, rule in (
            ("D", 0, ValueError, "at least 1"),
            ("D", -8, ValueError, "at least 1"),
            ("D", 8.0, TypeError, "an int"),
            ("D", None, TypeError, "an int"),
            ("D", True, TypeError, "an int"),
            ("D", "8", TypeError, "an int"),
            ("F", 0, ValueError, "at least 1"),
            ("F", 6.5, TypeError, "an int"),
            ("E", 0, ValueError, "between 1 and 4096"),
            ("E", 4097, ValueError, "between 1 and 4096"),
            ("E", 4.0, TypeError, "an int"),
            ("K", 0, ValueError, "between 1 and 4 (the experts, and at most 32)"),
            ("K", 5, ValueError, "between 1 and 4 (the experts, and at most 32)"),
            ("K", -1, ValueError, "between 1 and 4 (the experts"),
            ("K", 2.0, TypeError, "an int"),
            ("bias", 1, TypeError, "True or False"),
            ("bias", None, TypeError, "True or False"),
            ("renormalize", "no", TypeError, "True or False"),
            ("keep", 3, TypeError, "one of preactivation, h8, input, auto"),
            ("keep", "all", ValueError, "one of preactivation, h8, input, auto"),
            ("device", "gpu", ValueError, "a device or its name"),
            ("device", 1.5, TypeError, "a device or its name"),
            ("dtype", "float32", TypeError, "a torch.dtype"),
            ("dtype", torch.int64, TypeError, "bfloat16, float16, float32 or float64"),
        )
    },
    "MoE activation": (lambda: module(activation="swish"), ValueError, "MoE: activation must be one of swiglu, "),
    "MoE activation function": (
        lambda: module(activation=nn.PReLU()),
        ValueError,
        "MoE: activation must be a pointwise function of (gate, up), or of h alone, got PReLU: it reads a tensor",
    ),
    "MoE more than 32 per token": (
        lambda: module(E=64, K=33),
        ValueError,
        "MoE: K must be between 1 and 32 (the experts, and at most 32)",
    ),
    "MoE of None": (lambda: call_module(None), TypeError, "MoE: x must be a tensor, got None"),
    "MoE of numpy": (lambda: call_module(numpy.zeros((T, D))), TypeError, "MoE: x must be a tensor, got a numpy.ndarray"),
    "MoE of another width": (
        lambda: call_module(zeros(T, D - 1)),
        ValueError,
        "MoE: x must have last size D=8, got shape [6, 7]",
    ),
    "MoE of no axis": (lambda: call_module(zeros()), ValueError, "MoE: x must have shape [..., D], got shape []"),
    "MoE of integers": (lambda: call_module(ids(T, D)), TypeError, "MoE: x must be bfloat16, float16, float32"),
    "MoE of sparse": (lambda: call_module(sparse(T, D)), TypeError, "MoE: x must be dense"),
    "MoE of another dtype": (
        lambda: call_module(zeros(T, D), dtype=torch.bfloat16),
        TypeError,
        "MoE: x must have the dtype torch.bfloat16 of w_up, got torch.float32",
    ),
    "MoE of another device": (
        lambda: call_module(zeros(T, D), device="meta"),
        ValueError,
        "MoE: x must be on meta like w_up, got cpu",
    ),
    "MoE traced": (
        lambda: torch.jit.trace(module(), (zeros(T, D),)),
        NotImplementedError,
        "MoE: torch.jit.trace is not supported, use",
    ),
    "MoE scripted": (lambda: torch.jit.script(module()), NotImplementedError, "MoE: torch.jit.script is not supported, use"),
    # route
    **{f"route {k}": (lambda v=v: route(logits=v), TypeError, "route: logits must be a tensor") for k, v in NO_TENSOR.items()},
    "route sparse": (lambda: route(logits=sparse(T, E)), TypeError, "route: logits must be dense"),
    "route integers": (lambda: route(logits=ids(T, E)), TypeError, "route: logits_TE must be bfloat16, float16, float32"),
    "route no axis": (lambda: route(logits=zeros()), ValueError, "route: logits must have shape [..., E], got shape []"),
    "route no experts": (
        lambda: route(logits=zeros(T, 0)),
        ValueError,
        "route: logits must have shape [..., E], got shape [6, 0]",
    ),
    "route too many experts": (lambda: route(logits=zeros(1, 4097)), ValueError, "route: logits_TE must have 1 to 4096 experts"),
    "route top_k 0": (
        lambda: route(top_k=0),
        ValueError,
        "route: top_k must be between 1 and 4 (the experts, and at most 32), got 0",
    ),
    "route top_k > E": (lambda: route(top_k=5), ValueError, "route: top_k must be between 1 and 4"),
    "route top_k float": (lambda: route(top_k=2.0), TypeError, "route: top_k must be an int, got 2.0"),
    "route top_k tensor": (
        lambda: route(top_k=torch.tensor(2)),
        TypeError,
        "route: top_k must be an int, got a tensor of shape []",
    ),
    "route top_k None": (lambda: route(top_k=None), TypeError, "route: top_k must be an int, got None"),
    "route bias list": (lambda: route(bias=[0.0] * E), TypeError, "route: bias must be a tensor, got a list"),
    "route bias shape": (
        lambda: route(bias=zeros(E + 1)),
        ValueError,
        "route: bias_E must have shape [4] (experts of logits_TE)",
    ),
    "route bias dtype": (lambda: route(bias=ids(E)), TypeError, "route: bias_E must be float32 or torch.float32"),
    "route bias device": (lambda: route(bias=zeros(E, device="meta")), ValueError, "route: bias_E must be on cpu like logits_TE"),
    "route scoring": (lambda: route(scoring="relu"), ValueError, "route: scoring must be one of softmax, softmax_topk, sigmoid"),
    "route scoring function": (lambda: route(scoring=torch.sigmoid), TypeError, "route: scoring must be one of softmax, "),
    "route renormalize": (lambda: route(renormalize=1), TypeError, "route: renormalize must be True or False, got 1"),
    "route scale text": (lambda: route(scale="2"), TypeError, "route: scale must be a number, got '2'"),
    "route scale tensor": (lambda: route(scale=torch.ones(())), TypeError, "route: scale must be a number, got a tensor"),
    "route scale 0": (lambda: route(scale=0.0), ValueError, "route: scale must be positive and finite, got 0.0"),
    "route scale nan": (lambda: route(scale=float("nan")), ValueError, "route: scale must be positive and finite, got nan"),
    "route groups": (lambda: route(num_groups=3), ValueError, "route: num_groups must divide the 4 experts, got 3"),
    "route groups 0": (lambda: route(num_groups=0), ValueError, "route: num_groups must divide the 4 experts, got 0"),
    "route groups float": (lambda: route(num_groups=2.0), TypeError, "route: num_groups must be an int, got 2.0"),
    "route top_groups": (lambda: route(top_groups=2), ValueError, "route: top_groups must be between 1 and num_groups=1, got 2"),
    "route top_groups text": (lambda: route(top_groups="1"), TypeError, "route: top_groups must be an int, got '1'"),
    "route few reachable": (
        lambda: route(logits=zeros(T, 8), top_k=3, num_groups=4, top_groups=1),
        ValueError,
        "route: top_k must be at most 2",
    ),
    "route traced": (
        lambda: torch.jit.trace(lambda x: route(logits=x), (zeros(T, E),)),
        NotImplementedError,
        "route: torch.jit.trace is not supported",
    ),
    **{
        f"rounding {name} {k}": (lambda n=name, v=v: rounding(**{n: v}), TypeError, f"round_routing: {name} must be a tensor")
        for name in ("weights", "experts")
        for k, v in NO_TENSOR.items()
    },
    **{
        f"rounding {name} {v!r}": (lambda name=name, v=v: rounding(**{name: v}), kind, f"round_routing: {name} must be {rule}")
        for name, v, kind, rule in (
            ("num_experts", 0, ValueError, "between 1 and 4096"),
            ("num_experts", 4.0, TypeError, "an int"),
            ("spare", K, ValueError, "between 0 and 1, the slots less one, got 2"),
            ("spare", -1, ValueError, "between 0 and 1"),
            ("spare", True, TypeError, "an int"),
            ("tile", 0, ValueError, "at least 1, got 0"),
            ("tile", 128.0, TypeError, "an int"),
            ("mode", "closest", ValueError, "one of nearest, up, down, got 'closest'"),
            ("mode", None, TypeError, "one of nearest, up, down"),
        )
    },
    "rounding integer weights": (lambda: rounding(weights=ids(T, K)), TypeError, "round_routing: weights must be bfloat16"),
    "rounding ids in floats": (lambda: rounding(experts=zeros(T, K)), TypeError, "round_routing: experts must be int32 or int64"),
    "rounding one number": (lambda: rounding(weights=zeros()), ValueError, "round_routing: weights must have shape [..., K"),
    "rounding no slots": (lambda: rounding(weights=zeros(T, 0)), ValueError, "round_routing: weights must have shape [..., K"),
    "rounding other ids": (
        lambda: rounding(experts=ids(T, K + 1)),
        ValueError,
        "round_routing: experts must have shape [6, 2] (that of weights), got shape [6, 3]",
    ),
    "rounding on two devices": (
        lambda: rounding(experts=ids(T, K).to("meta")),
        ValueError,
        "round_routing: experts must be on cpu (as weights), got meta",
    ),
    "rounding scripted": (
        lambda: torch.jit.script(moeblaze_ops.round_routing),
        NotImplementedError,
        "round_routing: torch.jit.script is not supported",
    ),
    "route scripted": (
        lambda: torch.jit.script(moeblaze_ops.route),
        NotImplementedError,
        "route: torch.jit.script is not supported",
    ),
    # shard_experts
    "shard_experts no mesh": (
        lambda: moeblaze_ops.shard_experts(moeblaze_ops.MoE(D, F, E, K), None),
        TypeError,
        "shard_experts: mesh must be a DeviceMesh of one axis, such as init_device_mesh(...)['ep'], got None",
    ),
    "shard_experts no model": (
        lambda: moeblaze_ops.shard_experts("model", None),
        TypeError,
        "shard_experts: model must be an nn.Module, got 'model'",
    ),
    # explain and verify
    **{
        f"{op} {kind_of(model)}": (
            lambda op=op, model=model: getattr(moeblaze_ops, op)(model, zeros(T, D)),
            TypeError,
            f"{op}: model must be a module or a function, got {kind_of(model)}",
        )
        for op in ("explain", "verify")
        for model in (None, "model", [1], 3, torch.zeros(1))
    },
    **{
        f"{op} a class": (
            lambda op=op: getattr(moeblaze_ops, op)(moeblaze_ops.MoE, zeros(T, D)),
            TypeError,
            f"{op}: model must be a module or a function, got the class MoE: make one of it first",
        )
        for op in ("explain", "verify")
    },
    "verify on the meta device": (
        lambda: moeblaze_ops.verify(moeblaze_ops.MoE(D, F, E, K), torch.empty(T, D, device="meta")),
        ValueError,
        "verify: model must have numbers, as its inputs (explain does without), got tensors on the meta device",
    ),
    # memory_estimate
    "memory_estimate of a GPU that is not there": (
        lambda: estimate(device="cuda:77"),
        ValueError,
        f"memory_estimate: device must be a GPU that is here (of {torch.cuda.device_count()}), got 'cuda:77'",
    ),
    **{
        f"estimate {name} {v!r}": (
            lambda name=name, v=v: estimate(**{name: v}),
            kind,
            f"memory_estimate: {name} must be {rule}, got {v!r}",
        )
        for name, v, kind, rule in (
            ("T", -1, ValueError, "at least 0"),
            ("T", 6.0, TypeError, "an int"),
            ("T", None, TypeError, "an int"),
            ("D", 0, ValueError, "at least 1"),
            ("D", -8, ValueError, "at least 1"),
            ("D", 8.5, TypeError, "an int"),
            ("F", 0, ValueError, "at least 1"),
            ("F", 1e3, TypeError, "an int"),
            ("E", 0, ValueError, "between 1 and 4096"),
            ("E", -4, ValueError, "between 1 and 4096"),
            ("K", 0, ValueError, "between 1 and 4, the experts"),
            ("K", 5, ValueError, "between 1 and 4, the experts"),
            ("K", True, TypeError, "an int"),
            ("keep", "all", ValueError, "one of preactivation, h8, input, auto"),
            ("keep", 1, TypeError, "one of preactivation, h8, input, auto"),
            ("dtype", "bf16", TypeError, "a torch.dtype"),
            ("dtype", torch.int8, TypeError, "bfloat16, float16, float32 or float64"),
            ("gated", 2, TypeError, "True or False"),
            ("bias", None, TypeError, "True or False"),
            ("router", "yes", TypeError, "True or False"),
            ("compiled", 0, TypeError, "True or False"),
            ("device", "gpu", ValueError, "a device or its name"),
            ("device", 3.5, TypeError, "a device or its name"),
        )
    },
    # accumulate_grad
    "accumulate list": (
        lambda: moeblaze_ops.accumulate_grad([1]),
        TypeError,
        "accumulate_grad: parameter must be a tensor, got a list",
    ),
    "accumulate no leaf": (
        lambda: moeblaze_ops.accumulate_grad(leaf(3) * 2),
        ValueError,
        "accumulate_grad: parameter must be a leaf that requires gradients",
    ),
    "accumulate frozen": (
        lambda: moeblaze_ops.accumulate_grad(zeros(3)),
        ValueError,
        "accumulate_grad: parameter must be a leaf",
    ),
    "accumulate twice": (twice, ValueError, "accumulate_grad: parameter must accumulate once"),
    "accumulate into a list": (
        lambda: moeblaze_ops.accumulate_grad(leaf(3), [0.0]),
        TypeError,
        "accumulate_grad: buffer must be a tensor, got a list",
    ),
    "accumulate into another shape": (
        lambda: moeblaze_ops.accumulate_grad(leaf(3), zeros(4)),
        ValueError,
        "accumulate_grad: buffer must have shape [3] of the parameter",
    ),
    "accumulate into another dtype": (
        lambda: moeblaze_ops.accumulate_grad(leaf(3), ids(3)),
        TypeError,
        "accumulate_grad: buffer must be float32 or torch.float32",
    ),
    "accumulate into sparse": (
        lambda: moeblaze_ops.accumulate_grad(leaf(3), sparse(3)),
        TypeError,
        "accumulate_grad: buffer must be dense",
    ),
    "accumulate into a leaf": (
        lambda: moeblaze_ops.accumulate_grad(leaf(3), leaf(3)),
        ValueError,
        "accumulate_grad: buffer must not require gradients",
    ),
    # dispatch
    "dispatch one axis": (
        lambda: dispatch(ids(T)),
        ValueError,
        "dispatch: experts_TK must have 2 dimensions [T, K], got shape [6]",
    ),
    "dispatch floats": (
        lambda: dispatch(zeros(T, K)),
        TypeError,
        "dispatch: experts_TK must be int32 or int64, got torch.float32",
    ),
    "dispatch no experts": (
        lambda: dispatch(num_experts=0),
        ValueError,
        "dispatch: num_experts must be between 1 and 4096, got 0",
    ),
    "dispatch K = 0": (
        lambda: dispatch(ids(T, 0)),
        ValueError,
        "dispatch: experts_TK must have 1 column or more, got 0",
    ),
    "dispatch sparse": (
        lambda: dispatch(ids(T, K).to_sparse()),
        TypeError,
        "dispatch: experts_TK must be dense (to_dense()), got layout torch.sparse_coo",
    ),
    "dispatch nested": (
        lambda: dispatch(torch.nested.nested_tensor([ids(3, K), ids(2, K)])),
        TypeError,
        "dispatch: experts_TK must be dense",
    ),
}


def check(call, kind, message, run=lambda call: call()):
    with pytest.raises(kind) as raised:
        run(call)
    assert type(raised.value) is kind
    assert str(raised.value).startswith(message), str(raised.value)
    assert re.fullmatch(r"\w+: [\w.]+ (must .+, got .+|is not supported, use .+)", str(raised.value), re.DOTALL)


def test_the_table_is_large():
    assert len(CALLS) >= 120


@pytest.mark.parametrize("name", CALLS)
def test_bad_calls(name):
    check(*CALLS[name])


COMPILED = [
    "moe x none", "moe w_up list", "moe b_up number", "moe integer x", "moe float experts", "moe w_up of another dtype",
    "moe x wider", "moe x longer", "moe half the up width", "moe K > E", "moe odd b_up", "moe unknown activation", "moe keep",
    "moe interleaved", "MoE of another width", "MoE of integers", "route top_k > E", "route scoring function", "route no axis",
]  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_bad_calls_while_compiling(name):
    """The frame is left to Python where it raises, as Dynamo leaves every frame that raises."""
    if name == "route scoring function" and torch.__version__ < "2.12":
        pytest.skip("Dynamo asks builtin functions for their module wrongly")
    torch._dynamo.reset()
    check(*CALLS[name], run=lambda call: torch.compile(call, backend="eager")())


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

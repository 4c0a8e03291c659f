"""Argument checks that the ops on a router's logits share."""

import math

from torch import Tensor

from moeblaze_ops.arguments.validation import MAX_EXPERTS, require
from moeblaze_ops.arguments.validation_calls import SCORINGS
from moeblaze_ops.arguments.validation_values import check_float_dtype


def check_logits(op: str, logits_TE: Tensor) -> None:
    shape = list(logits_TE.shape)
    require(logits_TE.dim() == 2, op, "logits_TE", "have 2 dimensions [T, E]", f"shape {shape}")
    require(1 <= logits_TE.shape[1] <= MAX_EXPERTS, op, "logits_TE", f"have 1 to {MAX_EXPERTS} experts", f"shape {shape}")
    check_float_dtype(op, "logits_TE", logits_TE)


def check_like_logits(op: str, name: str, tensor: Tensor, logits_TE: Tensor) -> None:
    require(tensor.device == logits_TE.device, op, name, f"be on {logits_TE.device} like logits_TE", tensor.device)


def check_scoring(op: str, scoring: str, scale: float) -> None:
    require(scoring in SCORINGS, op, "scoring", f"be one of {', '.join(SCORINGS)}", repr(scoring))
    require(0 < scale < math.inf, op, "scale", "be positive and finite", scale)

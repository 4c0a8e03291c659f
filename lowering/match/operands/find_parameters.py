"""The tensors that hold the parameters of an activation: one number for all experts, or one for each.

    gate * torch.sigmoid(self.beta * gate) * up              # beta of one element
    gate * torch.sigmoid(self.beta[e] * gate) * up           # beta [E], or a parameter of each expert's module
"""

from collections.abc import Sequence

from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.operands.find_operands import Finder, Operand
from moeblaze_ops.lowering.match.operands.find_scales import held_of_experts
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove
from moeblaze_ops.lowering.match.terms.expert_term import ExpertTerm


def find_parameters(
    algebra: Algebra, finder: Finder, numbers: Sequence[Expr | None], experts: Sequence[ExpertTerm]
) -> tuple[Operand, ...]:
    """One operand for each parameter, of one element or of one for each expert, in the order of the experts.

    ``numbers`` are those that ids are compared with, which need not rise.
    """
    found: list[Operand] = []
    places = [own if own is not None and own.kind == "var" else algebra.const(i) for i, own in enumerate(numbers)]
    for values in zip(*(expert.parameters for expert in experts), strict=True):
        if len(set(values)) == 1 and not values[0].free:
            operand = finder.find_table((values[0],), (1, (algebra.zero,)), reshaped=True)
        else:
            operand = held_of_experts(algebra, finder, dict(zip(places, values, strict=True)))
        if operand is None:
            raise Declined(Reason.ACTIVATION, "a parameter that is neither one number nor one for each expert")
        prove(operand.dtype.is_floating_point and not operand.is_rounded, Reason.DTYPE_PATH, "a rounded parameter")
        found.append(operand)
    return tuple(found)

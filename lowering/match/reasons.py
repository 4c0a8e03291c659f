"""Why a candidate is left alone: the obligations a match has to prove, by name."""

from enum import Enum

from torch import fx


class Reason(Enum):
    """Names are stable (they are counted and shown); values say what could not be proven.

    The order is that of the proof: of several attempts at one layer the one that came furthest is reported.
    """

    OTHER_TERMS = "the sum holds terms that are not expert outputs, or starts from a buffer that is not fresh zeros"
    ROUTING = "an expert's weight is not a routing weight selected by comparing expert ids"
    SLOT_WEIGHTS = "weights are not aligned with their slots"
    NOT_TWO_PROJECTIONS = "an expert is not an up projection, a pointwise activation and a down projection"
    ACTIVATION = "what stands between the projections is not a pointwise function of them alone"
    PROJECTION_WEIGHTS = "a projection's weight is not one tensor indexed by expert"
    SAME_PERMUTATION = "tokens and outputs are not permuted alike"
    DIFFERENT_INPUTS = "experts do not read the same tokens"
    DIFFERENT_ACTIVATIONS = "experts do not share one activation"
    EXPERT_COVERAGE = "experts are not each used exactly once"
    WEIGHT_LAYOUT = "expert weights are not a view of [E, G, F, D]"
    DISTINCT_EXPERTS = "an output or a score is stored instead of added, and a token may have several"
    DTYPE_PATH = "dtypes along the way are not those of the fused operators"
    OPERAND_CHANGED = "an operand is written between its use and the end of the layer, or before the backward that needs it"
    BUFFER_ALIASED = "a written buffer is visible elsewhere"
    EXTRA_USER = "an intermediate result has another user"
    GRADIENTS = "an input that has gradients of zeros would have none, or the other way round"
    EFFECT = "an operator inside the layer does more than give a value, such as to draw random numbers"
    CONTEXT = "autocast or gradient mode changes inside the layer"
    ALL_EXPERTS = "every expert takes every token, for which plain products are faster on a CPU"
    STATEMENT = "the sum is not what a layer of its operands computes"
    OPERANDS = "the fused operators do not take these operands"
    LAYOUT = "the strides of the result are not those of dense axes in any order"
    INTERNAL = "an error in the rewrite itself"

    @property
    def rank(self) -> int:
        return list(Reason).index(self)


class Declined(Exception):
    """An obligation was not met; ``node`` is where, when that is known."""

    def __init__(self, reason: Reason, detail: str = "", node: fx.Node | None = None):
        super().__init__(f"{reason.name}: {detail}" if detail else reason.name)
        self.reason, self.detail, self.node = reason, detail, node


def prove(condition: object, reason: Reason, detail: str = "", node: fx.Node | None = None) -> None:
    if not condition:
        raise Declined(reason, detail, node)

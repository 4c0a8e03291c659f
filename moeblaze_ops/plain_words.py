"""What Dynamo and a backend say of a frame, in words of the program."""

import re

_CHANGES_OUTSIDE = "Unsafe side effect"
_SEQUENTIAL = "`checkpoint_sequential`"
_WORDS_INSIDE = {
    _SEQUENTIAL: "it is called by checkpoint_sequential, which is not traced: call torch.utils.checkpoint.checkpoint instead",
    "GetAttrVariable(AutogradFunctionVariable(": "an autograd.Function reads a tensor that is an attribute of its class: "
    "keep it in a global variable",
}
_PLAIN_WORDS = {
    "Data-dependent branching": "a branch depends on the elements of a tensor",
    "Could not guard on data-dependent": "a branch depends on the elements of a tensor",
    "Could not extract specialized": "a branch or a size depends on the elements of a tensor",
    "Dynamic shape operator": "the size of a result depends on the elements of a tensor",
    _CHANGES_OUTSIDE: "it changes something outside; allowed, without the change in backward, by "
    "torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint",
    "Attempted to use tensor creation function with requires_grad=True": "a tensor is made with requires_grad=True: leave that "
    "out, since what is added to it has a gradient already",
    "Data dependent operator": "a number is read from a tensor",
    "Unsupported Tensor.item()": "a number is read from a tensor",
    "Unsupported Tensor.tolist()": "numbers are read from a tensor",
}


def in_plain_words(reason: str) -> str:
    """The first line of what Dynamo says, after what it means where that is known; the name of an error may stand before it."""
    first = first_line(reason)
    said = re.sub(r"^\w+: ", "", first)
    inside = next((words for part, words in _WORDS_INSIDE.items() if part in reason), None)
    meaning = inside or next((words for begin, words in _PLAIN_WORDS.items() if said.startswith(begin)), None)
    return f"{meaning} ({first})" if meaning else first


def first_line(text: str) -> str:
    """The first line that says why: what a backend raised stands behind the line that says so."""
    first, _, rest = text.strip().partition("\n")
    return first_line(rest) if first.endswith(" raised:") and rest.strip() else first


def checkpoints_eagerly(reason: str) -> bool:
    """True if Dynamo leaves all to eager mode that a function checkpoints: it changes something outside, or is called by torch.

    collected.append(router_logits), checkpoint_sequential(blocks, 2, x)      but not  return router_logits, checkpoint(block, x)
    """
    return _CHANGES_OUTSIDE in first_line(reason) or _SEQUENTIAL in reason

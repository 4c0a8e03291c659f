"""What a traced branch leaves in the graph: where its work begins and ends, and what is to be proven of it.

Both are proven away before the graph is compiled: whoever runs one has a graph that nobody has checked.
"""

from typing import Any


def branch_forks() -> None:
    """From here to `branch_begins` stands what the program runs where the work is not done."""
    raise RuntimeError("a branch on data was traced on both sides, and never proven")


def branch_begins(condition: Any, works_if: bool, fork: None) -> None:
    """From here to `branch_ends` runs what the program runs where ``condition`` is ``works_if`` only."""
    raise RuntimeError("a branch on data was traced as if it were always taken, and never proven")


def branch_ends(begin: None, without: tuple, with_: tuple, added: tuple) -> None:
    """Here the two ways join: where the work is not done, each of ``with_`` must be what the same of ``without`` is.

    And each of ``added``, which a list that is only concatenated has more of, must have no rows then.
    """
    raise RuntimeError("a branch on data was traced as if it were always taken, and never proven")

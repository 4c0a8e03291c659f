"""What a traced branch leaves in the graph: where its work begins and ends, and what is to be proven of it.

Both are proven away before the graph is compiled: whoever runs one has a graph that nobody has checked.
"""

from typing import Any


def branch_begins(condition: Any, works_if: bool) -> None:
    """From here to `branch_ends` runs what the program runs where ``condition`` is ``works_if`` only."""
    raise RuntimeError("a branch on data was traced as if it were always taken, and never proven")


def branch_ends(begin: None, without: tuple, with_: tuple) -> None:
    """Here the two ways join: where the work is not done, each of ``with_`` must be what the same of ``without`` is."""
    raise RuntimeError("a branch on data was traced as if it were always taken, and never proven")

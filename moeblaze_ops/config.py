"""Every knob of the package, with its default."""

check_expert_ids: bool = False
"""Raise for expert ids other than -1 outside [0, E), at the price of a host sync in ``dispatch``."""

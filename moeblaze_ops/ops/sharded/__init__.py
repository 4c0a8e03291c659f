"""Ops of layers whose experts are on several ranks: what travels, and what is computed where."""

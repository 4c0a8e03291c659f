"""Experts whose weights have low-rank additions."""

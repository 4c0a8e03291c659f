"""Loops over rows that counts on the host split."""

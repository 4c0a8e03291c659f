"""Pieces of syntax trees."""

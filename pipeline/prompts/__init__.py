"""Texts to token ids and weights."""

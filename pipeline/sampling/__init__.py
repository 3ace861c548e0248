"""Samplers as tables of numbers, the schedules they are made of, and noise; NumPy only."""

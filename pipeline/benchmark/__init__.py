"""Measuring exports beside their peers."""

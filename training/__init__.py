"""Trains the checkpoint that the repository ships in checkpoints/emoji."""

"""Where it goes: checkpoint to SavedModels, SavedModels to functions, functions to pictures."""

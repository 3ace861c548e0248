"""What is typed at a prompt: one file a command, its flags and its help."""

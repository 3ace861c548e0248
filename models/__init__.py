"""What is computed: the networks, the denoising loop and the functions that are exported."""

"""Predicts the GPU memory of a PyTorch program without a GPU."""

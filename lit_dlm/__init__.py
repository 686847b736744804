"""lit-dlm: post-train and decode masked diffusion language models with PyTorch Lightning."""

__version__ = "0.1.0"

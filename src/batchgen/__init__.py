"""batchgen renders a whole prompt list with a diffusion model, on whatever memory the machine has."""

__version__ = "0.1.0"

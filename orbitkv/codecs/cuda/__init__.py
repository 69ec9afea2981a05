"""Kernels of the codecs for an NVIDIA GPU. Importing this imports nothing of CUDA."""

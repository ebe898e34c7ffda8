"""Without a GPU Triton can only be interpreted, which is decided when it is first imported: any optimiser does so."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

"""Other projects' packages as oracles: their layers and kernels on any machine, their Triton run by its interpreter.

    gla = oracles.fla("layers").GatedLinearAttention(hidden_size=32, num_heads=2)
    naive = oracles.fla("ops.simple_gla.naive").naive_recurrent_simple_gla
    scan = oracles.mamba_ssm("ops.triton.ssd_combined").mamba_chunk_scan_combined

Ask for a package inside a test or a fixture, never at a file's top: the call skips the test where the package isn't
installed, and from the first call on Triton is interpreted in this process. `make parity` installs all of them.
"""

from __future__ import annotations

from tests.oracles.compare import assert_close, gradients, randomise
from tests.oracles.laws import assert_same_law
from tests.oracles.naive import plain_loop
from tests.oracles.packages import fla, mamba_ssm, transformers

__all__ = [
    "assert_close",
    "assert_same_law",
    "fla",
    "gradients",
    "mamba_ssm",
    "plain_loop",
    "randomise",
    "transformers",
]

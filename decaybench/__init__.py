"""decaybench: how well does a linear recurrence remember, at which distance, and do add-ons help?

    import decaybench
    [config] = decaybench.configure("niah", preset="smoke", flags={"model.name": "mamba2", "model.post": {}})
    record = decaybench.run(config)

Names are loaded when first used: `import decaybench` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decaybench.core.errors import RunError as RunError
    from decaybench.core.errors import UserError as UserError
    from decaybench.harness.config import RunConfig as RunConfig
    from decaybench.harness.presets import configure as configure
    from decaybench.harness.run import run as run
    from decaybench.harness.spectra import spectrum as spectrum
    from decaybench.models.config import ModelConfig as ModelConfig
    from decaybench.models.language_model import build_model as build_model
    from decaybench.results.record import Record as Record

__version__ = "0.1.0"

_HOMES = {
    "ModelConfig": "decaybench.models.config",
    "Record": "decaybench.results.record",
    "RunConfig": "decaybench.harness.config",
    "RunError": "decaybench.core.errors",
    "UserError": "decaybench.core.errors",
    "configure": "decaybench.harness.presets",
    "build_model": "decaybench.models.language_model",
    "run": "decaybench.harness.run",
    "spectrum": "decaybench.harness.spectra",
}

__all__ = ["ModelConfig", "Record", "RunConfig", "__version__", "build_model", "configure", "run", "spectrum"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'decaybench' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

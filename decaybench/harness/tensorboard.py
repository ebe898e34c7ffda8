"""What a training's log gets, for TensorBoard too: a scalar for each number of an event, by its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from decaybench.core.errors import RunError
from decaybench.core.files import writing


@contextmanager
def tensorboard(folder: Path, step: int) -> Iterator[Callable[[Mapping[str, float | str]], None]]:
    """What takes events; the files lie in `folder`, and what was written there for later steps than `step` is void.

    Raises RunError where the package isn't installed, or the folder can't be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise RunError(
            "tensorboard=true needs the package tensorboard: pip install 'decaybench[tensorboard]'"
        ) from None

    def write(event: Mapping[str, float | str]) -> None:
        for name, value in event.items():
            if name != "step" and not isinstance(value, str):
                writer.add_scalar(f"training/{name}", value, int(event["step"]))

    with writing(folder):
        writer = SummaryWriter(str(folder), purge_step=step + 1)
        try:
            yield write
        finally:
            writer.close()

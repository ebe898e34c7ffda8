"""decaybench as a model of lm-eval: its tasks, asked of a checkpoint by lm-eval's own command.

    lm_eval --model decaybench --model_args checkpoint=RUN,tokenizer=PATH --tasks lambada_openai --batch_size auto

lm-eval finds the model by the entry point `lm_eval.models`, which its releases up to 0.4.13 don't read yet; with these
the same words go to `python -m decaybench.harness.lm_eval_model`. Model arguments: checkpoint, tokenizer, device,
backend, dtype, start, batch_tokens. A batch has at most --batch_size rows (1 is lm-eval's default; auto: any number)
and batch_tokens tokens.

No text is cut, whatever its length. lm-eval puts a token before a text only where there is nothing else before it; so
does `start=none`, with the tokenizer's separator. Generation is greedy: a temperature is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, field_validator

from decaybench.core.config import Config, parse
from decaybench.core.errors import RunError, UserError
from decaybench.core.names import unknown
from decaybench.harness.environment import resolve_device
from decaybench.harness.model_info import parameter_counts
from decaybench.harness.reader import Answer, Continuation, Document, Prompt, Reader, Request, tokenizer_of
from decaybench.models.checkpoints import find_checkpoint
from decaybench.models.language_model import resolve_backend
from decaybench.tasks.reading import Start

NAME = "decaybench"
NEEDED = "lm-eval's tasks need its package: pip install 'decaybench[lm]'"

Dtype = Literal["float32", "bfloat16"]
Result = TypeVar("Result")

_DEFAULT_DEVICE = "cuda:0"  # of lm-eval's command
_NEW_TOKENS = 256  # lm-eval's own default
_MOST_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OF_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "seed")  # nothing to a greedy choice


class ModelArguments(Config):
    """What `--model_args`, `--device` and `--batch_size` say."""

    checkpoint: str = Field(description="a run or a checkpoint")
    tokenizer: str | None = Field(
        default=None, description="bytes, a tokenizer.json or its folder, or an RWKV vocabulary file; none: bytes"
    )
    device: str = Field(default="auto", description="auto, cpu or cuda")
    backend: str = Field(default="auto", description="kernels of the recurrence")
    dtype: Dtype = Field(default="float32", description="of matrix products")
    start: Start = Field(default="none", description="token before each row: none, separator, or an id")
    batch_size: int | None = Field(default=None, ge=1, description="rows a batch, at most; none: by batch_tokens")
    max_batch_size: int | None = Field(default=None, ge=1, description="the same, where batch_size is auto")
    batch_tokens: int = Field(default=16_384, ge=1, description="tokens a batch, at most")

    @field_validator("batch_size", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return None if isinstance(value, str) and value.partition(":")[0] == "auto" else value

    @field_validator("checkpoint", "tokenizer", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        """lm-eval makes a number of a folder's name that looks like one."""
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


class Asked:
    """What lm-eval asks of a model; with its own base class it is `DecaybenchLM`."""

    cache_hook: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        found = parse(ModelArguments, arguments, "model_args")
        checkpoint = find_checkpoint(Path(found.checkpoint))
        tokenizer = tokenizer_of(checkpoint, found.tokenizer, found.start)
        device = resolve_device(found.device.removesuffix(":0"))
        backend, _ = resolve_backend(found.backend, checkpoint.config.name)
        model = checkpoint.model(device=device, backend=backend)
        self._reader = Reader(
            model,
            tokenizer,
            device=device,
            batch_tokens=found.batch_tokens,
            batch_rows=found.batch_size or found.max_batch_size,
            start=found.start,
            dtype=found.dtype,
        )
        self._said = {
            "model_sha": checkpoint.sha256,
            "model_dtype": found.dtype,
            "model_num_parameters": parameter_counts(model).trainable,
            "tokenizer_sha256": tokenizer.sha256,
        }

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> Self:
        """The model from --model_args and, where these don't say it, from flags of lm-eval's own.

        A GPU that is asked for by lm-eval's own default and isn't there is not missed.
        """
        flags = {key: value for key, value in (additional_config or {}).items() if value is not None}
        if flags.get("device") == _DEFAULT_DEVICE:
            flags["device"] = "auto"
        return cls(**{**flags, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> Self:
        """The same from key=value,key=value."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy) of each request's (context, continuation)."""
        return self._answers("loglikelihood", requests, likelihood, disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each request's (text,)."""
        return self._answers("loglikelihood_rolling", requests, lambda answer: likelihood(answer)[0], disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each request's (context, options)."""
        return self._answers("generate_until", requests, written, disable_tqdm)

    def get_model_info(self) -> dict[str, Any]:
        """What enters lm-eval's results."""
        return self._said

    def _answers(
        self, kind: str, requests: Sequence[Any], result: Callable[[Answer], Result], disable_tqdm: bool
    ) -> list[Result]:
        from tqdm import tqdm

        asked = [request_of(kind, request.args) for request in requests]
        found: dict[int, Result] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc=f"Running {kind} requests") as bar:
            for batch in self._reader.answers(asked):
                for index, answer in batch:
                    found[index] = result(answer)
                    self.cache_hook.add_partial(kind, requests[index].args, found[index])
                bar.update(len(batch))
        return [found[index] for index in range(len(requests))]


def request_of(kind: str, arguments: Sequence[Any]) -> Request:
    """What an lm-eval request (its type and arguments) asks. Raises UserError for images, sound and sampling."""
    if kind == "loglikelihood" and len(arguments) == 2:
        return Continuation(*arguments)
    if kind == "loglikelihood_rolling" and len(arguments) == 1:
        return Document(*arguments)
    if kind == "generate_until" and len(arguments) == 2:
        return _prompt(*arguments)
    raise UserError(f"lm-eval asks for {kind} of {len(arguments)} parts: decaybench's models read and write text alone")


def likelihood(answer: Answer) -> tuple[float, bool]:
    """The answer as lm-eval takes it for a loglikelihood request."""
    assert answer.log_likelihood is not None and answer.greedy is not None, "not a prompt's"
    return answer.log_likelihood, answer.greedy


def written(answer: Answer) -> str:
    """The answer as lm-eval takes it for a generate_until request."""
    assert answer.text is not None, "a prompt's"
    return answer.text


def register() -> None:
    """Make the model known to lm-eval. Raises RunError where lm-eval isn't installed."""
    try:
        import_module("lm_eval.models")  # else ours alone would be known
        from lm_eval.api.registry import model_registry
    except ImportError:
        raise RunError(NEEDED) from None
    if NAME not in model_registry:
        model_registry.register(NAME, target="decaybench.harness.lm_eval_model:DecaybenchLM")


def main() -> None:
    """lm-eval's command, with the model known to it. Exit codes: 1 failed, 2 wrong input."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except (UserError, RunError) as error:
        sys.stderr.write(f"decaybench: {' '.join(str(error).split())}\n")
        sys.exit(2 if isinstance(error, UserError) else 1)


def __getattr__(name: str) -> Any:
    """`DecaybenchLM`, made when it is first asked for: lm-eval, whose class it extends, is imported only then."""
    if name == "DecaybenchLM":
        return _model()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _model() -> type:
    from lm_eval.api.model import LM

    return type("DecaybenchLM", (Asked, LM), {"__module__": "decaybench.harness.lm_eval_model"})


def _prompt(context: str, options: Mapping[str, Any]) -> Prompt:
    given = {key: value for key, value in options.items() if value is not None}
    known = ("until", *_MOST_TOKENS, *_OF_SAMPLING)
    for key in given:
        if key not in known:
            raise unknown("generation option", key, known)
    heat, samples = given.get("temperature", 0), given.get("do_sample")
    if samples or (samples is None and float(heat) > 0):
        raise UserError(
            f"generation option temperature={heat} do_sample={samples}: generation is greedy here; write temperature=0 "
            "or do_sample=False"
        )
    until = given.get("until", ())
    most = next((int(given[key]) for key in _MOST_TOKENS if key in given), _NEW_TOKENS)
    if most < 1:
        raise UserError(f"generation option max_gen_toks={most}: at least 1 token")
    return Prompt(context, (until,) if isinstance(until, str) else tuple(until), most)


if __name__ == "__main__":
    main()

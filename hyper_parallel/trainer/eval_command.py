"""``hyper-parallel eval``: the loss of a model on text, on any number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.errors import CheckpointError
from hyper_parallel.models.llama.config import LlamaConfig
from hyper_parallel.trainer.checkpoint_folder import Place
from hyper_parallel.trainer.checkpoint_options import CheckpointOptions
from hyper_parallel.trainer.checkpoint_read import check_weights, open_whole_checkpoint
from hyper_parallel.trainer.checkpoint_state import TrainState
from hyper_parallel.trainer.checkpoint_tensors import MODEL_FOLDER
from hyper_parallel.trainer.combinations import check_model
from hyper_parallel.trainer.command_line import UsageError, parse_options
from hyper_parallel.trainer.data_options import TextOptions
from hyper_parallel.trainer.devices import check_devices
from hyper_parallel.trainer.eval_options import EvalOptions
from hyper_parallel.trainer.launch_environment import is_scheduler, is_worker, rank_command
from hyper_parallel.trainer.launcher import run_job
from hyper_parallel.trainer.options import TrainOptions, ValidationOptions
from hyper_parallel.trainer.output_folder import check_output, mark_output
from hyper_parallel.trainer.processes import check_processes
from hyper_parallel.trainer.summary import encode_json
from hyper_parallel.trainer.train_command import run_reporting
from hyper_parallel.trainer.validation import Validation
from hyper_parallel.trainer.validation_text import open_texts
from hyper_parallel.trainer.worker import run_guarded

__all__ = ["EVAL_FILE", "evaluate", "run"]

EVAL_FILE = "eval.json"

_CONFIG = "config.json"

_TEXT = ("format", "field", "tokenizer", "bos_token", "eos_token", "document_masks")
"""Options of the text that an evaluation takes over from the run."""


@dataclass(frozen=True)
class _Source:
    """Where weights are, and the job that goes with them."""

    folder: Path
    options: TrainOptions
    text: str
    """What the weights are evaluated on, in words."""

    checkpoint: Path | None = None
    """What the folder belongs to, where it is part of a checkpoint of training."""

    fingerprint: int | None = None
    """Of the text that the run has read, where it is evaluated on that or its end."""


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    return run_reporting("eval", lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> int:
    arguments = _with_weights(arguments)
    options = parse_options(EvalOptions, "eval", arguments)
    source = _find(options, arguments)
    if is_worker(os.environ):
        return run_guarded(lambda: _work(options, source))
    check_processes(options.parallelism, options.nproc)
    check_devices(options.backend, options.device, options.nproc)
    try:
        check_output(options.output)
        check_model(source.options)
        fingerprint = open_texts(source.options)[0].fingerprint
        mark_output(options.output)
    except FileNotFoundError as error:
        hint = "" if options.data is not None else "; name another text with --data"
        raise UsageError(f"{error}{hint}") from None
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    command = rank_command("eval", arguments)
    if source.fingerprint not in (None, fingerprint):
        print("note: there is another text now than the run has read, or it is read in another way", flush=True)
    print(f"starting {options.nproc} processes of {options.backend}", flush=True)
    run_job(command, nproc=options.nproc, backend=options.backend, log_folder=options.output / "logs")
    return 0


def _with_weights(arguments: Sequence[str]) -> Sequence[str]:
    """What people give first, and is no options file, is what to evaluate."""
    if not arguments or arguments[0].startswith("-"):
        return arguments
    first = Path(arguments[0])
    if not first.exists():
        raise UsageError(
            f"there is no {first}: expected a Hugging Face folder, a checkpoint of training, a run's folder, or a "
            "YAML file of options"
        )
    return ["--weights", *arguments] if first.is_dir() else arguments


def _find(options: EvalOptions, arguments: Sequence[str]) -> _Source:
    """The folder of the weights, with the sizes that its config says; text is read as it was in training, as far as
    ``arguments`` do not say otherwise.
    """
    path = options.weights
    if path is None:
        raise UsageError(
            "eval needs a Hugging Face folder, a checkpoint of training, or a run's folder: hyper-parallel eval "
            "FOLDER, or --weights FOLDER"
        )
    try:
        folder, checkpoint, text, run = path, None, TextOptions(), None
        if not (path / _CONFIG).is_file():
            checkpoint = Place(path, CheckpointOptions().folder).locate()
            run = open_whole_checkpoint(checkpoint)[1]
            folder, text = checkpoint / MODEL_FOLDER, _text_of(run)
        elif (path / "tokenizer.json").is_file():
            text = TextOptions(tokenizer=path)
        text = parse_options(EvalOptions, "eval", arguments, EvalOptions(text=text)).text
        data, validation, named = _what_to_read(options, run)
        training = options.as_training(LlamaConfig.from_hf(folder), text, data, validation)
        own = run is not None and data is not None and data == _path(run.options.get("data")) and options.data is None
        return _Source(folder, training, named, checkpoint, run.data.get("text") if own and run is not None else None)
    except (OSError, CheckpointError, ValueError) as error:
        raise UsageError(f"cannot evaluate {path}: {error}") from None


def _text_of(state: TrainState) -> TextOptions:
    """How the text was read in training, as far as it matters here."""
    before = dict(state.options.get("text") or {})
    kept: dict[str, Any] = {name: before[name] for name in _TEXT if name in before}
    if kept.get("tokenizer") is not None:
        kept["tokenizer"] = Path(kept["tokenizer"])
    return TextOptions(**kept)


def _what_to_read(options: EvalOptions, run: TrainState | None) -> tuple[Path | None, ValidationOptions | None, str]:
    """The file or folder of the text, how its end was held out in training if that is to be read, and all in words."""
    if options.data is not None or run is None:
        return options.data, None, _name(options.data)
    before = run.options
    data = _path(before.get("data"))
    validation = dict(before.get("validation") or {})
    if not validation.get("freq"):
        return data, None, f"{_name(data)}, which the run was trained on"
    if validation.get("data"):
        data = Path(validation["data"])
        return data, None, f"{_name(data)}, which the run was validated on"
    held_out = ValidationOptions(freq=1, held_out=validation.get("held_out", ValidationOptions().held_out))
    return data, held_out, f"the end of {_name(data)}, which the run was validated on"


def _path(named: Any) -> Path | None:
    return Path(named) if named else None


def _name(data: Path | None) -> str:
    return "the source of Python's standard library" if data is None else str(data)


def _work(options: EvalOptions, source: _Source) -> int:
    """What a rank does."""
    from hyper_parallel.platform import get_platform  # loads the framework, which the starting process does not need

    platform = get_platform(options.backend)
    if is_scheduler(os.environ):
        platform.ensure_initialized(options.device)  # serves the ranks, and returns when they have ended
        return 0
    from hyper_parallel.platform.training import load_training_tools
    from hyper_parallel.platform.weights import get_weight_backend
    from hyper_parallel.tensor_parallel.model_tensors import every_rank

    if source.checkpoint is not None:
        platform.ensure_initialized(options.device)
        like = get_weight_backend().empty_on(options.device)
        check_weights(source.checkpoint, every_rank(), like)
    found = evaluate(source.options, source.folder, options.max_batches, named=source.text)
    if platform.rank() == 0:
        row = {
            "loss": found.loss,
            "perplexity": found.perplexity,
            "bits_per_token": found.loss / math.log(2),
            "tokens": found.tokens,
            "weights": str(options.weights),
        }
        mark_output(options.output)
        (options.output / EVAL_FILE).write_text(encode_json(row, indent=2) + "\n", encoding="utf-8")
        print(
            f"{source.folder}: loss {found.loss:.4f}, perplexity {found.perplexity:.2f}, "
            f"{row['bits_per_token']:.3f} bits a token, {found.tokens:,} tokens\n"
            f"written: {options.output / EVAL_FILE}",
            flush=True,
        )
    load_training_tools().close()
    return 0


def evaluate(options: TrainOptions, weights: Path, batches: int = 0, named: str = "the text") -> Validation:
    """The loss of the weights in a Hugging Face folder on the text of ``options``, or on its end where that is held
    out. Collective over the job; rank 0 says what it does, and how far it is.

    Args:
        options: of a job with that model.
        weights: the folder.
        batches: how many to look at; 0: all.
        named: what to call the text.

    Raises:
        CheckpointError: the weights do not fit ``options.model``, or cannot be read; the same on all ranks.
    """
    from hyper_parallel.core.device_mesh import init_device_mesh
    from hyper_parallel.loss_parallel import get_train_context
    from hyper_parallel.platform import get_platform
    from hyper_parallel.platform.training import load_training_tools
    from hyper_parallel.trainer.eval_progress import EvalProgress
    from hyper_parallel.trainer.setup import build_model, make_loss
    from hyper_parallel.trainer.validator import Validator

    config = options.parallelism
    shape = (config.data_parallel_degree, config.tensor_parallel_degree)
    mesh = init_device_mesh(options.device, shape, mesh_dim_names=("dp", "tp"))
    tools = load_training_tools()
    tools.seed(options.seed, options.device)
    model = build_model(options, mesh, tools, weights=weights).model
    context = get_train_context(config.loss_parallel_enabled, config)
    loss = make_loss(options, model, context)
    text, held_out = open_texts(options)
    text = text if held_out is None else held_out
    validator = Validator(model, loss, context, text, mesh, max_batches=batches)
    if get_platform().rank() != 0:
        return validator.run()
    whole, size = -(-text.windows // text.batch_size), f"{text.batch_size} x {text.sequence_length} tokens"
    part = "all" if validator.batches == whole else f"the first {validator.batches:,} of"
    print(f"{weights} on {named}: {part} {whole:,} batches of {size}", flush=True)
    progress = EvalProgress(validator.batches)
    try:
        return validator.run(progress.step)
    finally:
        progress.close()

"""Hugging Face checkpoints: :func:`load_hf_checkpoint` and :func:`save_hf_checkpoint`.

The way of a weight: header and index (:mod:`.safetensors_header`, :mod:`.checkpoint_files`) -> names and shapes of the
model (:mod:`.checkpoint_match`) -> one report, agreed on by all ranks -> the runs of bytes that the shard description
gives this rank (:mod:`.byte_runs`) -> its memory. Saving goes the other way (:mod:`.save_plan`, :mod:`.save_stream`).
"""

from __future__ import annotations

from hyper_parallel.tensor_parallel.checkpoint_report import CheckpointReport, LoadReport
from hyper_parallel.tensor_parallel.hf_load import load_hf_checkpoint
from hyper_parallel.tensor_parallel.hf_save import save_hf_checkpoint

__all__ = ["CheckpointReport", "LoadReport", "load_hf_checkpoint", "save_hf_checkpoint"]

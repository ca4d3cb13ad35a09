"""Settings of where a finished run is published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class HubConfig:
    """Where a finished run is pushed on the Hugging Face Hub. The token is that of `hf auth login` or HF_TOKEN."""

    push_to: str | None = (
        None  # user/name of the repository for model, tokenizer, card and TensorBoard files; None: off
    )
    private: bool = True

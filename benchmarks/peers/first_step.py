"""The demo's pretraining with the Hugging Face Trainer: `python -m benchmarks.peers.first_step DATA`.

DATA is the folder that `make demo` prepares. `benchmarks.start` waits for "step 1", printed after the first step.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.harness import QUIET, hide_torch_xla

hide_torch_xla()

from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Announce(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        print("step 1", flush=True)


def main(data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer", trust_remote_code=False)
    sizes = {
        "embedding_size": 128,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = AlbertForMaskedLM(
        AlbertConfig(vocab_size=len(tokenizer), intermediate_size=512, **sizes)
    )
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        max_steps=2,  # more than one, because the Trainer does more work at the end of the last step
        learning_rate=2e-3,
        adam_beta2=0.98,
        use_cpu=True,
        **QUIET,
    )
    tokens = load_file(min(data.glob("train-*.safetensors")))["tokens"].astype(np.int64)
    rows = [{"input_ids": row} for row in tokens.tolist()]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    Trainer(
        model, arguments, train_dataset=rows, data_collator=collator, callbacks=[Announce()]
    ).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

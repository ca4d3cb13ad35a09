"""The demo pretraining with the Hugging Face Trainer: `python -m benchmarks.peers.first_step ROWS TOKENIZER`.

ROWS is a file of numpy with token rows [N, S], ready to be masked; TOKENIZER a folder. "step 1" is printed after the
first step; `benchmarks.start` waits for it.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import numpy as np

from benchmarks.harness import hide_torch_xla

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


def main(rows: str, tokenizer_folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, trust_remote_code=False)
    sizes = {"embedding_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AlbertForMaskedLM(AlbertConfig(vocab_size=len(tokenizer), intermediate_size=512, **sizes))
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        max_steps=2,  # the first step must not be the last one, after which there is more to do
        learning_rate=2e-3,
        adam_beta2=0.98,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"input_ids": row} for row in np.load(rows, allow_pickle=False).tolist()]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    Trainer(model, arguments, train_dataset=data, data_collator=collator, callbacks=[Announce()]).train()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Text as rows of token ids by `datasets`: `python -m benchmarks.peers.mapped TEXT TOKENIZER FOLDER SEQ_LEN PROCESSES`.

As examples of transformers prepare a corpus: each paragraph is tokenised, a thousand are joined and cut into rows.
"""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer

Columns = dict[str, list[Any]]


def prepare(text: str, source: str, folder: Path, *, seq_len: int, processes: int) -> int:
    """Write rows of `seq_len` tokens to `folder`, and return how many there are."""
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    options: dict[str, Any] = {"batched": True}
    if processes > 1:
        options["num_proc"] = processes

    def tokenised(batch: Columns) -> Columns:
        encoded: Columns = tokenizer(batch["text"], return_special_tokens_mask=True).data
        return encoded

    def grouped(batch: Columns) -> Columns:
        joined = {name: list(chain.from_iterable(lists)) for name, lists in batch.items()}
        end = len(joined["input_ids"]) // seq_len * seq_len
        starts = range(0, end, seq_len)
        return {
            name: [values[start : start + seq_len] for start in starts]
            for name, values in joined.items()
        }

    rows = load_dataset(
        "text",
        data_files=text,
        sample_by="paragraph",
        split="train",
        cache_dir=str(folder / "cache"),
    )
    tokens = rows.map(tokenised, remove_columns=["text"], **options)
    packed = tokens.map(grouped, **options)
    packed.save_to_disk(str(folder / "rows"))
    return len(packed)


def main() -> None:
    text, source, folder, seq_len, processes = sys.argv[1:]
    print(prepare(text, source, Path(folder), seq_len=int(seq_len), processes=int(processes)))


if __name__ == "__main__":
    main()

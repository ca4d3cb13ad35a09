"""TensorBoard's own reader finds in our events files what was written, and writing needs none of its slow imports."""

import math
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.observe.curves import Curves, masked_crc


def read(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_each_number_with_its_step_and_time(tmp_path):
    curves = Curves(tmp_path / "new" / "folder", first_step=1)
    curves.add({"train/loss": 1.5, "train/tokens": 10**9}, step=1, time_unix_s=1000.25)
    # A length of more than 127 bytes has two bytes in protobuf.
    many = {f"train/number_{number}": float(number) for number in range(200)}
    curves.add({"train/loss": math.inf, **many}, step=2, time_unix_s=1001.0)
    # Nothing waits in a buffer: another process sees the lines of a run that goes on.
    found = read(tmp_path / "new" / "folder")
    assert found["train/loss"] == [(1, 1.5), (2, math.inf)]
    assert found["train/tokens"] == [(1, 1e9)]
    assert all(found[tag] == [(2, value)] for tag, value in many.items())
    events = EventAccumulator(str(tmp_path / "new" / "folder"))
    events.Reload()
    assert events.Scalars("train/loss")[0].wall_time == 1000.25
    curves.close()


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path):
    first = Curves(tmp_path, first_step=1)
    for step in range(1, 6):
        first.add({"loss": 1.0}, step=step, time_unix_s=step)
    first.close()
    second = Curves(tmp_path, first_step=4)
    second.add({"loss": 2.0}, step=4, time_unix_s=9)
    second.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert read(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


# The first is the check value of CRC-32C in RFC 3720, appendix B.4; masked as TFRecord's comment says.
@pytest.mark.parametrize(("content", "crc"), [(bytes(32), 0x8A9136AA), (b"123456789", 0xE3069283)])
def test_the_checksum_is_that_of_tfrecord(content, crc):
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    assert int.from_bytes(masked_crc(content), "little") == (rotated + 0xA282EAD8) & 0xFFFFFFFF


def test_writing_curves_imports_neither_torch_nor_the_stand_in_of_tensorflow(tmp_path):
    code = """if True:
        import sys
        from pathlib import Path
        from train.observe.curves import Curves
        Curves(Path(sys.argv[1]), first_step=1).add({"loss": 1.0}, step=1, time_unix_s=1.0)
        print(*sys.modules)
    """
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    slow = {"torch", "boto3", "fsspec", "tensorboard.compat.tensorflow_stub"}
    assert not slow & set(done.stdout.split())

"""Checkpoints: a step is whole and verified, or it is not there.

`checkpoints/step_00001000/` holds `model.pt`, `optimizer.pt`, `ranks.pt` (tensors and plain containers, the same for
every backend) and, written last, `manifest.json`: length and sha256 of each file, the run's identity, settings and
progress. On disk the folder is written under another name, synced, and renamed; in S3 the manifest is created last, and
what has none does not exist. `LATEST`, on disk, is a hint for people: reading goes by the manifests. Nothing is loaded
before its checksum was compared.

    manifest   what is said of a step           store      where steps are: disk, S3       retention  what may go
    staging    the copy on the host             saver      save beside the training, load  __main__   list, verify, ...
"""

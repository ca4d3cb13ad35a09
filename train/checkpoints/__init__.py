"""Checkpoints: a step is whole and verified, or absent.

`checkpoints/step_00001000/` holds `model.pt`, `optimizer.pt`, `ranks.pt` (tensors and plain containers, the same for
every backend) and, written last, `manifest.json`: length and sha256 of each file, the run's identity, settings and
progress. An engine that splits the state over ranks has each of them write its part, `model_00001.pt` of rank 1; the
loader makes whole tensors of them, for any engine and number of ranks.

On disk the folder is written under another name, synced, and renamed; in S3 the manifest is created last, and a step
without one does not exist. Readers go by the manifests; `LATEST`, on disk, is a hint for people. No file is loaded
before its checksum was compared.

    manifest     describes a step               store_disk, store_s3   steps on disk, and in S3
    staging      the copy in host memory        store                  their protocol; opens either
    saver        saves beside the training      writer                 writes a step: files of ranks, one manifest
    loader       loads the newest valid step    retention              decides which steps are removed
    __main__     list, verify, prune, export, diff
"""

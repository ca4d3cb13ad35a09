"""Checkpoints: a step is whole and verified, or absent.

`checkpoints/step_00001000/` holds `model.pt`, `optimizer.pt`, `ranks.pt` (tensors and plain containers, the same for
every backend) and, written last, `manifest.json`: length and sha256 of each file, the run's identity, settings and
progress. An engine that splits the state over ranks has each of them write its part, `model_00001.pt` of rank 1.

Readers go by the manifests; `LATEST`, on disk, is a hint for people. Checksums are compared before any file is loaded.

    manifest    describes a step              store, store_s3   steps on disk and in S3, and which are removed
    staging     the copy in host memory       loader            loads the newest valid step
    saver       saves beside the training     __main__          list, verify, prune, export, diff
"""

"""The files that a run owns on disk or in S3: its folder, owner, identity and outcome. Does not import torch."""

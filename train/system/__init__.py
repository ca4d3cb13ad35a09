"""Facts about the machine and this process's start, and access to files on disk and in S3. It does not import torch."""

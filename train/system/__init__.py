"""Facts about the machine and this process, and access to files on disk and in S3. Does not import torch."""

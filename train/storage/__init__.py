"""Files on disk, in S3 and on the Hub, and the one opener of files that others wrote. Does not import torch."""

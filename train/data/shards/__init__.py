"""Token shards: format, order, cache, download from S3."""

"""The data pipeline: corpus -> tokenizer -> packing -> shards -> order -> batches."""

"""The way from text to batches: corpus -> tokenizer -> packing -> shards -> order -> batches."""

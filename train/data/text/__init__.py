"""Text to token shards: corpus, tokenizer, packing, preparation."""

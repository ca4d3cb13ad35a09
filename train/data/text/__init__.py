"""From text to token shards: corpus, tokenizer, packing, preparation."""

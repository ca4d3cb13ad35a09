"""The span of a context that answers a question, as in SQuAD: windows of tokens, spans and their scores, the task."""

"""Encoders of Hugging Face's transformers with the heads of tasks."""

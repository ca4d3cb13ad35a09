"""Batches of static shapes: loader, lengths, masking."""

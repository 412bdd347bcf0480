"""Batches: lists of prompts that are known before the first one is computed."""

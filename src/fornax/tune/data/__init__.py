"""Data of post-training: conversations, pairs, prompts to tokens, masks and batches."""

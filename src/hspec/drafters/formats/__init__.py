"""Drafter checkpoints in the layouts of others: read into this project's terms, and written from them."""

"""Offline batches: JSON lines of requests in, JSON lines of answers out, resumable, on Ray or in this process."""

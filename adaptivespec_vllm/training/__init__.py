"""Training an EAGLE-3 head for a target: answers -> features -> vocabulary -> head -> export.

Each stage leaves its result in the working directory and goes on where it was interrupted. Nothing here is needed to
decode, and nothing here imports vLLM before answers are generated.
"""

"""The policies in another cost regime: recorded drafts replayed in virtual time.

Above the engine, but without it: what is replayed was recorded once, and nothing here needs vLLM or a model.
"""

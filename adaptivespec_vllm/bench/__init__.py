"""`adaptivespec bench` and `adaptivespec compare`: ways of decoding, measured in turns in one process.

The order of reading: ``arms`` and ``prompts`` say what is decoded, ``engines`` how it is served, ``measure`` takes the
turns, ``result`` holds what came of them, ``figures`` makes numbers of it, ``report`` and ``plots`` show them.
"""

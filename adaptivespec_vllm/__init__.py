"""AdaptiveSpec for vLLM: adaptive speculative decoding with EAGLE-3 draft trees."""

__version__ = "0.1.0"

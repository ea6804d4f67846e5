"""The embedded demo: SmolLM2-135M-Instruct with its EAGLE-3 head, decoded four ways on a CPU."""

"""`adaptivespec eval`: what ways of decoding do to answers, paired with plain decoding prompt by prompt."""

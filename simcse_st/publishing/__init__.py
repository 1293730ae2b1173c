"""A run -> its card -> the Hub -> the proof that the published copy is the measured model."""

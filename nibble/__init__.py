"""nibble: a serving appliance for 4-bit (NVFP4) language models on vLLM."""

__version__ = "0.1.0"

"""Tests on a real vLLM: `make test-vllm`."""

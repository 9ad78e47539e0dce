"""The embedded engine: vLLM's dialect over a Hugging Face model, for laptops, tests and CI.

The front is the process that answers HTTP requests and never touches the model. The decoder is the
process that holds the model and decodes.
"""

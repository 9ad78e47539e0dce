"""An engine of our own: vLLM's dialect over a Hugging Face model, for laptops, tests and CI.

`http` answers requests and never touches the model; `core` is the process that decodes.
"""

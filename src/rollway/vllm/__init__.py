"""Runs inside vLLM, which loads it by its own options:

    --worker-extension-cls rollway.vllm.WorkerExtension --middleware rollway.vllm.Middleware

Nothing is imported here but what vLLM itself brings.
"""

from .middleware import Middleware
from .reload import WorkerExtension

__all__ = ["Middleware", "WorkerExtension"]

"""Reloads weights exactly, inside vLLM's workers.

vLLM's own `reload_weights` leaves two parts of a model wrong: the experts of a Mixture-of-Experts on
CPU, which stay in the layout of the checkpoint, and the output layer of a model with tied embeddings,
which stays old.
"""

from typing import Any


class WorkerExtension:
    """Methods that vLLM adds to each of its workers, and that `/collective_rpc` can call."""

    device: Any
    model_runner: Any

    def load_version(self, weights_path: str, version: str) -> dict[str, Any]:
        """Load the weights of a version, so that the model is what a fresh start would load. Return the
        version, and how many tokens of each request were drawn before it. None means that this cannot be
        seen: vLLM has two kinds of model runners, and only one of them lists its requests."""
        model = self.model_runner.get_model()
        if self.device.type == "cpu":
            forget_expert_kernels(model)
        self.model_runner.reload_weights(weights_path=weights_path)
        update_tied_head(model)
        running = getattr(self.model_runner, "requests", None)
        if running is None:
            return {"version": version, "drawn": None}
        drawn = {name: len(request.output_token_ids) for name, request in running.items()}
        return {"version": version, "drawn": drawn}


def forget_expert_kernels(model: Any) -> None:
    """Make vLLM pack the experts again. It does so only while a layer has no kernel yet."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def update_tied_head(model: Any) -> None:
    """Give the output layer the weights of the embeddings, if the two are tied but reloaded apart."""
    heads, embeddings = (
        [module for module in model.modules() if type(module).__name__ == name]
        for name in ("ParallelLMHead", "VocabParallelEmbedding")
    )
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    if not is_tied or len(heads) != 1 or len(embeddings) != 1:
        return
    head, source = heads[0], embeddings[0].weight
    if head.weight.data_ptr() != source.data_ptr():
        head.weight.data.copy_(source.data)
    head.quant_method.process_weights_after_loading(head)

"""Tries model families of transformers with tiny random weights, and writes the table of docs/models.md.

    python tools/model_table.py [FAMILY ...] [--seconds 120] [--write]

Each family runs in a process of its own, with a time limit: the model is saved as a folder, opened,
its packing is proven, its routes are replayed, and it trains three steps on rollouts that the embedded
engine draws. After each step the engine loads the new weights. `--write` writes the page.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
START, END = "<!-- table: made by tools/model_table.py -->", "<!-- end of table -->"
FAMILIES = (
    "qwen2", "qwen3", "llama", "mistral", "ministral", "ministral3", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma3n_text", "gemma4_unified_text", "vaultgemma", "smollm3", "phi", "phi3",
    "olmo", "olmo2", "olmo3", "cohere", "cohere2", "glm", "glm4", "granite", "granite_swa",
    "helium", "starcoder2", "stablelm", "nemotron", "exaone4", "ernie4_5", "hunyuan_v1_dense",
    "hyperclovax", "seed_oss", "apertus", "arcee", "cwm", "jais2", "bitnet", "diffllama",
    "minicpm3", "nanochat", "persimmon", "modernbert-decoder", "youtu", "gpt2", "gpt_bigcode",
    "gpt_neo", "gpt_neox", "gptj", "codegen", "opt", "bloom", "falcon", "mpt", "xglm", "biogpt",
    "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "glm4_moe_lite",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "ernie4_5_moe", "dots1",
    "flex_olmo", "granitemoe", "granitemoe_swa", "granitemoeshared", "cohere2_moe", "llama4",
    "llama4_text", "hunyuan_v1_moe", "hy_v3", "phimoe", "minimax", "minimax_m2",
    "minimax_m3_vl_text", "afmoe", "aria_text", "axk1", "exaone_moe", "gemma4_text", "jetmoe",
    "laguna", "longcat_flash", "mellum", "mimo_v2_flash", "solar_open",
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid",
    "kimi_linear", "bailing_hybrid", "jamba", "bamba", "falcon_h1", "granitemoehybrid", "lfm2",
    "lfm2_moe", "nemotron_h", "mamba", "mamba2", "falcon_mamba", "recurrent_gemma", "zamba2",
    "rwkv", "xlstm",
    "bert", "xlnet",
)  # fmt: skip
"""Dense, with experts, with layers that carry a state, and two that are not causal."""
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "sliding_window": 24, "attention_chunk_size": 32, "num_experts": 8, "num_local_experts": 8,
    "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
    "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "intermediate_size_mlp": 96,
    "shared_expert_intermediate_size": 32, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512,
    "word_embed_proj_dim": 64, "ffn_dim": 96, "expand": 2, "n_mamba_heads": 4, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_num_heads": 8, "mamba_head_dim": 16, "num_heads": 8,
    "state_size": 16, "mamba_d_state": 16, "ssm_state_size": 16, "index_n_heads": 2,
    "index_head_dim": 16, "index_topk": 16, "index_block_size": 8, "index_topk_blocks": 2,
    "rotary_dim": 8, "d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 512, "window_size": 24,
    "expansion_ratio": 2, "num_expert_group": 2, "top_k_experts": 2, "enable_moe_block": True,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 300, "num_layers": 2,
    "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Settings of a tiny model, of which each family gets those that it knows."""
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
WINDOW_THEN_ALL = {"layer_types": ["sliding_attention", "full_attention"] * 2}
OTHER_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "axk1", "longcat_flash", "youtu"), LATENT
    ),
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "gemma3_text": WINDOW_THEN_ALL,
    "gemma3n_text": {**WINDOW_THEN_ALL, "num_kv_shared_layers": 0},
    "gemma4_text": WINDOW_THEN_ALL,
    "gemma3": {"vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
}  # fmt: skip
"""Settings that differ because a family has an order of layers, or heads, of its own."""
MAX_KL = 1e-3


def tiny_config(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    known = vars(kind())
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "text_config" in known:
        sizes["text_config"] = tiny_config(known["text_config"].model_type).to_dict()
    return kind(**{**sizes, **OTHER_SIZES.get(family, {})})


def tiny_model(family: str) -> Any:
    """Return a model whose weights are large enough for an error to show in its probabilities."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
    return model


def try_family(family: str) -> dict[str, Any]:
    """Return what holds for a family, or the reason why it is refused."""
    from rollway.errors import RollwayError
    from rollway.model.load import load_model
    from rollway.model.proof import open_rows
    from rollway.model.routers import check_replay

    found: dict[str, Any] = {"family": family}
    with TemporaryDirectory(prefix="rollway-family-") as folder:
        try:
            tiny_model(family).save_pretrained(f"{folder}/model")
        except Exception as error:
            return {**found, "error": f"no tiny model: {type(error).__name__}: {error}"}
        try:
            rows = open_rows(load_model(f"{folder}/model"))
            found["packing"], found["difference"] = rows.packing, rows.difference
            error = check_replay(rows.model, rows.routers)
            if rows.routers:
                found["replay"] = error
            found["engine"], found["kl"] = train(rows, Path(folder))
            if found["kl"] > MAX_KL:
                found["error"] = "engine and trainer differ"
        except RollwayError as error:
            found["error"] = str(error)
    return found


def train(rows: Any, folder: Path) -> tuple[str, float]:
    """Train three steps, and return how the engine decodes and the largest KL between the two."""
    import asyncio

    import torch

    from rollway.config.sections import TrainerConfig
    from rollway.inference.embedded.scheduler import Scheduler
    from rollway.inference.embedded.slots import open_slots
    from rollway.model.load import load_model, load_weights, save_weights
    from rollway.payload.reader import SegmentReader
    from rollway.records.batch import BatchManifest
    from rollway.records.ids import PolicyVersion, Step
    from rollway.trainer.step import Learner

    torch.set_num_threads(1)
    model = load_model(str(folder / "model"))
    slots = open_slots(model, 8, 160)
    engine, learner = Scheduler(slots, seed=0), Learner(rows, TrainerConfig(lr=1e-3))
    kls = []
    for step in range(1, 4):
        payload = folder / f"payload{step}"
        payload.mkdir()
        drawn = draw(engine)
        for sequence in drawn:
            check_reply(sequence, folder / "model")
        written = asyncio.run(write_rows(payload, drawn))
        planned = (tuple(range(len(written))),)
        manifest = BatchManifest(
            Step(step), PolicyVersion(step - 1), tuple(written), (planned,)
        )
        metrics = learner.step(manifest, SegmentReader(payload))
        assert not learner.left_out, learner.left_out
        kls.append(metrics["mismatch_kl"])
        save_weights(learner.model, folder / f"step_{step}")
        load_weights(model, str(folder / f"step_{step}"))
    return type(slots).__name__, max(kls)


def check_reply(sequence: Any, folder: Path) -> None:
    """Hold a reply against config.json, as a worker does."""
    from rollway.inference.replies.checks import ReplyRules
    from rollway.model.shape import read_shape

    routes = sequence.routes()
    if routes is not None:
        rules = ReplyRules(wants_routes=True, shape=read_shape(str(folder)))
        rules.check_routes(routes, int(routes.max()))


def draw(engine: Any) -> list[Any]:
    """Return the sequences that the engine draws for prompts longer and shorter than a window."""
    from rollway.inference.embedded.scheduler import GenerationRequest

    for number in range(8):
        prompt = [(37 * number + 11 * place) % 290 + 3 for place in range(5 + 9 * number)]
        engine.add(
            GenerationRequest(
                number, prompt, 8 + 3 * number, 1.0, 1.0, frozenset(), 0, seed=number
            )
        )
    finished = []
    while engine.has_work:
        finished += engine.run_pass()
    return finished


async def write_rows(payload: Path, sequences: list[Any]) -> list[Any]:
    """Write one row for each sequence, the way a worker does."""
    import numpy as np

    from rollway.payload.blob import build, row_columns
    from rollway.payload.writer import SegmentWriter
    from rollway.records.batch import BatchRow
    from rollway.records.ids import RolloutId
    from rollway.records.payload import SegmentName
    from rollway.records.turn import Turn
    from rollway.trace.trace import Trace

    rows = []
    with SegmentWriter(payload, SegmentName("w", 0), 1 << 20) as writer:
        for sequence in sequences:
            turn = Turn(
                prompt_ids=np.array(sequence.request.prompt, np.int32),
                completion_ids=np.array(sequence.tokens, np.int32),
                logprobs=np.array(sequence.logprobs, np.float32),
                versions=np.zeros(len(sequence.tokens), np.int32),
                temperature=1.0,
                finish_reason="length",
                routes=sequence.routes(),
            )
            trace, number = Trace(), sequence.request.id
            trace.add(turn)
            (row,) = trace.finish()
            ref = await writer.append(build(row_columns([row.columns()])))
            sizes = row.num_tokens, row.num_trainable
            rows.append(BatchRow(RolloutId(f"g0.{number}"), ref, 0, *sizes, number % 2 - 0.5))
    return rows


def in_process(family: str, seconds: float) -> dict[str, Any]:
    """Try a family in a process of its own, so that none can hang or crash the others."""
    command = [sys.executable, __file__, "--try", family]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"family": family, "error": f"took longer than {seconds:g} s"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"family": family, "error": reason}


COLUMNS = ("family", "rows", "difference", "replay", "decoding", "KL", "refused because")
DECODING = {"SlotModel": "together", "SeparateModel": "one by one"}


def line(found: dict[str, Any]) -> str:
    def number(name: str) -> str:
        return f"{found[name]:.0e}" if name in found else ""

    reason = " ".join(found.get("error", "").replace("|", "\\|").split())
    cells = (
        f"`{found['family']}`", found.get("packing", ""), number("difference"), number("replay"),
        DECODING.get(found.get("engine", ""), ""), number("kl"), reason,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of a family")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    parser.add_argument("--try", dest="one", metavar="FAMILY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(try_family(args.one)))
        return
    lines = []
    for family in args.families or FAMILIES:
        lines.append(line(in_process(family, args.seconds)))
        print(lines[-1], flush=True)
    if args.write:
        page = PAGE.read_text()
        before, _, rest = page.partition(START)
        after = rest.partition(END)[2]
        header = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        table = "\n".join([*header, *lines])
        PAGE.write_text(f"{before}{START}\n\n{table}\n\n{END}{after}")


if __name__ == "__main__":
    main()

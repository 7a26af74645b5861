"""Makes the golden files of an architecture that the project does not know yet, from its original code in transformers.

    python -m tiny.new MODEL_TYPE --out FOLDER [--set KEY=JSON].. [--long]

MODEL_TYPE is the `model_type` of config.json (of the text part where a model has several). The default configuration
is made small: `SMALL` says how, --set overrides it. Weights are random and exact in bf16; seeds are searched until no
greedy token and no choice of experts is a near tie. FOLDER gets

    hf/                  config.json and bf16 safetensors, as publishers store them
    golden.safetensors   tokens, logits, greedy, greedy_margin; with --long also long_tokens and long_logits

which `crates/conformance/tests/it/golden.rs` reads. At the end the numbers and switches of the configuration are
changed one by one, and how much the logits move is printed: what moves them is to be implemented, and what does not is
not tested by this model."""
import argparse
import contextlib
import json
import pathlib
import shutil
import tempfile

import numpy as np
import torch
import transformers

from .files import N_LONG, N_TOKENS, answers, save
from .witness import randomize, run

# Keys of configurations and small values for them, unlike each other, so that no swapped axis can hide.
SMALL = dict(
    vocab_size=96, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=96, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    # Experts.
    num_experts=6, num_local_experts=6, n_routed_experts=6, num_experts_per_tok=2, top_k_experts=2, moe_topk=2,
    moe_intermediate_size=32, expert_ffn_hidden_size=32, shared_expert_intermediate_size=40, n_shared_experts=1,
    num_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
    # Latents.
    q_lora_rank=24, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32,
    # Windows and recurrent states.
    sliding_window=17, attention_chunk_size=19, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=24, linear_conv_kernel_dim=4,
)
# Ways in which an attempt at random weights is no test: a greedy token, or a choice of experts, that rounding decides.
MIN_MARGIN, MIN_GAP, N_SEEDS = 0.05, 1e-4, 40


# Keys that every configuration has and no answer depends on.
IDLE = ("output_", "use_cache", "return_dict", "label2id", "is_encoder_decoder", "chunk_size_feed_forward",
        "initializer_range")


def configuration(model_type, settings):
    """The small configuration, and the keys that were set."""
    plain = transformers.AutoConfig.for_model(model_type).to_dict()
    small = {key: value for key, value in SMALL.items() if plain.get(key) is not None}
    small |= {key: None for key, value in SMALL.items() if value is None}
    given = {**small, **settings}
    return transformers.AutoConfig.for_model(model_type, **given), given


def build(config):
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    if any("experts" in key for key, _ in model.named_parameters()):
        model.set_experts_implementation("eager")
    return model


def special_values(key, p, r):
    """Norms and biases near what they begin with, so that norms stored as w - 1 stay near 0; biases of routers wide
    enough to change choices."""
    if key.endswith("e_score_correction_bias"):
        return 0.5 * r
    if p.ndim == 1 and key != "model.norm.weight":
        return p + 0.15 * r
    return None


@contextlib.contextmanager
def choices(gaps):
    """Collects how close each top-k choice was: the gap between the last chosen and the first other score, relative to
    the scores' deviation."""
    plain = torch.Tensor.topk

    def topk(x, k, dim=-1, **kw):
        if k < x.shape[dim]:
            scores = x.float().sort(dim, descending=True).values
            last, first = scores.select(dim, k - 1), scores.select(dim, k)
            open_ = first > -1e30  # not masked
            if open_.any():
                gaps.append(float((last - first)[open_].min() / x.float()[x > -1e30].std()))
        return plain(x, k, dim=dim, **kw)

    kept = torch.topk
    torch.Tensor.topk = torch.topk = topk
    try:
        yield
    finally:
        torch.Tensor.topk, torch.topk = plain, kept


def scale_logits(model, tokens):
    """Brings the logits to a standard deviation of about 3, by a power of two."""
    factor = 2.0 ** round(float(np.log2(3 / run(model, tokens).std())))
    with torch.no_grad():
        if model.config.tie_word_embeddings:
            model.get_parameter("model.norm.weight").mul_(factor)
        else:
            model.get_output_embeddings().weight.mul_(factor)


def make(config, is_long):
    """A model whose choices are no near ties, its answers, and its seed."""
    for seed in range(N_SEEDS):
        torch.manual_seed(seed)
        random = np.random.default_rng(seed)
        tokens, long = (random.integers(0, config.vocab_size, n) for n in (N_TOKENS, N_LONG))
        model = randomize(build(config), special_values)
        scale_logits(model, tokens)
        gaps = []
        with choices(gaps):
            golden, margins = answers(model, tokens, long if is_long else None)
        if margins.min() >= MIN_MARGIN and min(gaps, default=1.0) >= MIN_GAP:
            spread = golden["logits"].std()
            assert np.isfinite(golden["logits"]).all() and 0.7 < spread < 12, f"logits have a deviation of {spread}"
            golden["greedy_margin"] = margins
            return model, golden, seed
    raise SystemExit(f"no seed below {N_SEEDS} keeps its choices apart")


def changed(value):
    """Another value of a switch or a number; nothing for others."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value * 1.5 if value else 1.0
    return value + 1 if isinstance(value, int) else None


def effects(model, config, golden):
    """For each switch and number of the configuration: how much the logits move without it, relative to their
    deviation; nothing where it changes the shape of a weight, or is refused."""
    def flat(settings, path=()):
        for key, value in settings.items():
            yield from flat(value, (*path, key)) if isinstance(value, dict) else [((*path, key), value)]

    found, plain = {}, json.loads(config.to_json_string(use_diff=False))
    for path, value in flat(plain):
        is_shape = path[-1] in SMALL and path[-1] not in ("sliding_window", "attention_chunk_size")
        if is_shape or path[0].startswith(IDLE) or "dropout" in path[0] or changed(value) is None:
            continue
        edited = json.loads(json.dumps(plain))
        place = edited
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = changed(value)
        try:
            with contextlib.redirect_stderr(None):
                other = build(type(config).from_dict(edited))
                other.load_state_dict(model.state_dict())
                logits = run(other, golden["tokens"])
        except Exception as why:
            found[".".join(path)] = f"refused: {type(why).__name__}"
            continue
        moved = np.sqrt(((logits - golden["logits"]) ** 2).mean()) / golden["logits"].std()
        found[".".join(path)] = float(f"{moved:.3g}")
    return found


def write(out, model, golden):
    """The folder, and the answers."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        model.float()
        shutil.copytree(folder, out / "hf", ignore=shutil.ignore_patterns("generation_config.json"))
    (out / "hf/model.safetensors").chmod(0o644)
    save(golden, out / "golden.safetensors")


def check(out, golden):
    """Reads the folder back: only what was saved counts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32,
                                                              attn_implementation="eager").eval()
    again = np.abs(run(model, golden["tokens"]) - golden["logits"]).max() / golden["logits"].std()
    assert again < 1e-5, f"the folder gives other logits, off by {again}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_type")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write; replaced where it exists")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="a key of the configuration")
    parser.add_argument("--long", action="store_true", help="answers on a thousand tokens too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    pairs = (pair.split("=", 1) for pair in args.set)
    config, given = configuration(args.model_type, {key: json.loads(value) for key, value in pairs})
    model, golden, seed = make(config, args.long)
    moved = effects(model, config, golden)
    write(args.out, model, golden)
    check(args.out, golden)
    print(f"{type(model).__name__}, seed {seed}, {sum(p.numel() for p in model.parameters())} parameters, "
          f"logits' deviation {golden['logits'].std():.2f}, smallest greedy margin {golden['greedy_margin'].min():.3f}")
    print("settings: " + json.dumps({key: value for key, value in given.items() if value is not None}))
    print("what each key of the configuration does to the logits, relative to their deviation:")
    for key, effect in sorted(moved.items(), key=lambda item: -item[1] if isinstance(item[1], float) else 1):
        print(f"  {key:40} {effect}")


if __name__ == "__main__":
    main()

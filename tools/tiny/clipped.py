"""gemma4_clipped: a tiny Gemma 4 whose image encoder has clipped linears, after the folder `images/gemma4`.

The limits of each linear are quantiles of what it is given and what it gives without them, so that every one of them
cuts; those of one linear are infinite, as they are before training. The images are those of `images/gemma4`.

    pip install torch==2.15.0 torchvision==0.29.2 transformers==5.24.0 numpy==2.4.6 pillow safetensors
    cd tools && python -m tiny.clipped
"""
import json
import shutil

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_weights

from .files import DATA

SEED = 4101
SOURCE, OUT = DATA / "images/gemma4", DATA / "images/gemma4_clipped"
IMAGES = ("odd", "rgba")
N_VOCAB, IMAGE, START, END = 96, 8, 10, 11
#: The linear without limits.
FREE = "layers.1.self_attn.v_proj"
LIMITS = ("input_min", "input_max", "output_min", "output_max")


def smaller():
    """The config of `images/gemma4` with a smaller text model and the clipping."""
    config = json.loads((SOURCE / "hf/config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    text |= dict(vocab_size=N_VOCAB, vocab_size_per_layer_input=N_VOCAB, hidden_size=32, num_hidden_layers=2,
                 intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, sliding_window=17,
                 layer_types=["sliding_attention", "full_attention"])
    vision |= dict(use_clipped_linears=True, standardize=True)
    return config


def randomize(model, generator):
    """Weights that are exact in bf16."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name:
                noise = 1 + 0.2 * noise
            elif "embed_tokens" in name or "position_embedding" in name:
                noise = 0.5 * noise
            else:
                noise = 1.5 * noise / p.shape[-1] ** 0.5
            p.copy_(noise.bfloat16())
        for name, b in model.named_buffers():
            if name.endswith(("layer_scalar", "std_scale", "std_bias")):
                noise = 0.1 * torch.randn(b.shape, generator=generator)
                b.copy_((noise + (not name.endswith("bias"))).bfloat16())


def clipped(model):
    """The clipped linears of the encoder by name."""
    of = model.model.vision_tower.named_modules()
    return {name: module for name, module in of if type(module).__name__ == "Gemma4ClippableLinear"}


def features(model, given):
    with torch.no_grad():
        return torch.cat(list(model.model.get_image_features(*given).pooler_output)).numpy()


def set_limits(model, given):
    """Sets the limits of one linear after the other from quantiles of a run with those before it."""
    for i, (name, module) in enumerate(clipped(model).items()):
        if name.endswith(FREE):
            continue
        seen = []
        hook = module.linear.register_forward_hook(lambda _, args, out: seen.extend([args[0], out]))
        features(model, given)
        hook.remove()
        for values, kind in zip(seen, ("input", "output")):
            for end, share in (("min", 0.1 + 0.01 * (i % 3)), ("max", 0.93 - 0.01 * (i % 4))):
                getattr(module, f"{kind}_{end}").copy_(torch.quantile(values.flatten(), share).bfloat16())


def moved(model, given, exact):
    """The least change of the features, in deviations, where one limit of one linear is taken away."""
    least = np.inf
    for name, module in clipped(model).items():
        for limit in LIMITS if not name.endswith(FREE) else ():
            buffer = getattr(module, limit)
            kept = buffer.clone()
            buffer.fill_(-np.inf if limit.endswith("min") else np.inf)
            least = min(least, float(np.sqrt(((features(model, given) - exact) ** 2).mean()) / exact.std()))
            buffer.copy_(kept)
    return least


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    hf = OUT / "hf"
    hf.mkdir(parents=True)
    (OUT / "images").mkdir()
    config = json.dumps(smaller(), indent=1) + "\n"
    (hf / "config.json").write_text(config)
    shutil.copy(SOURCE / "hf/preprocessor_config.json", hf)
    loaded = transformers.AutoConfig.from_pretrained(hf)
    loaded._attn_implementation = "eager"
    cls = transformers.Gemma4ForConditionalGeneration
    model = cls._from_config(loaded, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(SEED)
    randomize(model, generator)
    model.tie_weights()
    processor = transformers.AutoImageProcessor.from_pretrained(hf)
    given = {}
    for name in IMAGES:
        shutil.copy(SOURCE / f"images/{name}.png", OUT / f"images/{name}.png")
        found = processor(images=[Image.open(OUT / f"images/{name}.png")], return_tensors="pt")
        given[name] = (found["pixel_values"], found["image_position_ids"])
    free = features(model, given["odd"])
    set_limits(model, given["odd"])
    model.save_pretrained(hf)
    weights = load_file(hf / "model.safetensors")
    save_weights({name: w.bfloat16().contiguous() for name, w in weights.items()}, hf / "model.safetensors",
                 metadata={"format": "pt"})
    (hf / "generation_config.json").unlink(missing_ok=True)
    (hf / "config.json").write_text(config)

    model, info = cls.from_pretrained(hf, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    model.eval()
    arrays = {f"features.{name}": features(model, given[name]) for name in IMAGES}
    exact = arrays["features.odd"]
    change = float(np.sqrt(((free - exact) ** 2).mean()) / exact.std())
    least = moved(model, given["odd"], exact)
    assert change > 0.1 and least > 1e-4, (change, least)

    rng = np.random.default_rng(SEED)
    ids = [*rng.integers(20, N_VOCAB, 5), START, *[IMAGE] * len(exact), END, *rng.integers(20, N_VOCAB, 6)]
    ids = torch.tensor(np.array(ids, np.int64))[None]
    with torch.no_grad():
        arrays["logits.one"] = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).long(), use_cache=False,
                                     pixel_values=given["odd"][0],
                                     image_position_ids=given["odd"][1]).logits[0].numpy()
        text = torch.tensor(rng.integers(20, N_VOCAB, 40))
        arrays["logits"] = model(input_ids=text[None], use_cache=False).logits[0].numpy()
    arrays |= {"tokens.one": ids[0].numpy().astype(np.int32), "tokens": text.numpy().astype(np.int32)}
    save_file({name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())},
              OUT / "golden.safetensors")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    card = {"name": "gemma4_clipped", "prompts": {"one": {"images": ["odd"], "tokens": ids.shape[1]}},
            "moved by the limits": change, "moved by the least of them": least, "versions": versions}
    (OUT / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    sizes = sum(file.stat().st_size for file in OUT.rglob("*") if file.is_file())
    print(f"{sizes} bytes; the limits move the features by {change:.3f}, the least of them by {least:.1e}")


if __name__ == "__main__":
    main()

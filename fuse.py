"""fuse.py: merge an adapter into its base model.

    python fuse.py adapters/adapters.safetensors

needs nothing else: base model, rank and scale come from the file. What is written is a plain model
folder that quant.py, train.py and mlx-lm load: every adapted row becomes m/n (W + s BᵀAᵀ), formed
in float32 and rounded once, packed as its layer was. With --bits or --group-size the adapted
layers are packed so, whatever the base was (a dense base is then packed throughout); with
--dequantize nothing is packed.
"""

from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_unflatten

import dora
import quant
from quant import UserError


def fuse(
    adapter: str,
    model: str | None = None,
    save_path: str = "fused_model",
    dequantize: bool = False,
    bits: int | None = None,
    group_size: int | None = None,
    force: bool = False,
) -> None:
    """Merges an adapter file, or the folder it lies in, into its base and writes a model folder.

    --model        another copy of the base than the file names
    --dequantize   write dense weights
    --bits, --group-size
                   how to pack the adapted layers (affine)
    --force        merge even if the weights are not those the adapter was trained on
    """
    if dequantize and (bits or group_size):
        raise UserError("--dequantize and --bits or --group-size exclude each other")
    if bits or group_size:
        quant.check_packing(group_size, bits, "affine")
    _, settings = dora.read_adapter(adapter)
    base = model or settings["base"]
    if not base:
        raise UserError(f"{adapter} does not name its base model; give --model")
    with quant.Output(save_path) as folder:
        loaded, tokenizer, config = quant.load(base)
        dora.load_adapter(loaded, adapter, config, force)
        config = merge(loaded, config, dequantize, bits, group_size)
        quant.save_model(folder, loaded, config, tokenizer)
    print(f"wrote {Path(save_path)}: {base} with {adapter}")


def merge(model, config: dict, dequantize: bool, bits: int | None, group_size: int | None) -> dict:
    """Fuses every adapted layer of `model` in place, one at a time; returns the new config."""
    from tqdm import tqdm

    packing, dtype = config.get("quantization"), model.model.norm.weight.dtype
    asked = (bits, group_size) if packing else (None, None)
    layers = dora.adapted(model).items()
    for path, layer in tqdm(layers, disable=None, unit="layer", desc="fusing"):
        fused = layer.fuse(dequantize, *asked, dtype)
        mx.eval(fused.parameters())
        model.update_modules(tree_unflatten([(path, fused)]))
        if any(asked):
            how = dict(zip(("group_size", "bits", "mode"), dora.packing(fused), strict=True))
            config["quantization"][path] = how
    if dequantize and packing:
        return quant.unpack(model, config)
    if not packing and (bits or group_size):
        config, skipped = quant.pack(model, config, group_size, bits, "affine")
        if skipped:
            print(f"left dense, their width is no multiple of the group: {', '.join(skipped)}")
    return config


if __name__ == "__main__":
    quant.cli(fuse, errors=(dora.UserError,))

//! `moebius convert`: a model folder as a GGUF file, a GGUF file as an MLX folder.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use checkpoint::{Checkpoint, Kind};
use quant::WeightType;

use super::quantize::{is_same, report};
use crate::args::{ConvertArgs, OutputFormat};
use crate::convert::{Folder, mlx};
use crate::quantize::source::Source;
use crate::quantize::{Job, check_without_importance, mix, targets};
use crate::{machine, out};

pub fn run(args: &ConvertArgs) -> Result<()> {
    let input = crate::find::resolve(&args.input)?;
    let checkpoint = checkpoint::open_with(&input, checkpoint::Open { map: false, exact: true })?;
    let threads = machine::threads(args.threads)?;
    let form = args.to.unwrap_or(match checkpoint.kind() {
        Kind::Gguf => OutputFormat::Mlx,
        Kind::Mlx | Kind::Hf => OutputFormat::Gguf,
    });
    out::remove_unfinished_when_interrupted()?;
    match (form, checkpoint.kind()) {
        (OutputFormat::Gguf, Kind::Gguf) => {
            bail!(
                "failed to convert {}: it is already a GGUF file; `moebius quantize` changes its types",
                input.display()
            )
        }
        (OutputFormat::Mlx, Kind::Mlx | Kind::Hf) => {
            bail!("failed to convert {}: it is already a folder; MLX folders are made from GGUF files", input.display())
        }
        (OutputFormat::Gguf, _) => to_gguf(args, checkpoint, &input, threads),
        (OutputFormat::Mlx, _) => {
            ensure!(!args.mmproj, "--mmproj does not apply to MLX folders: image encoders become GGUF files");
            ensure!(args.dtype.is_none(), "--type does not apply to MLX folders: use --bits and --group-size");
            mlx::convert(checkpoint, &args.output, args.bits, args.group_size)
        }
    }
}

fn to_gguf(args: &ConvertArgs, checkpoint: Checkpoint, input: &Path, threads: usize) -> Result<()> {
    ensure!(
        args.bits.is_none() && args.group_size.is_none(),
        "--bits and --group-size do not apply to GGUF files: use --type"
    );
    let folder = match args.mmproj {
        true => Folder::encoder(checkpoint)?,
        false => Folder::new(checkpoint, args.pre.as_deref())?,
    };
    let file = match &args.dtype {
        Some(name) => mix::file_type(name)?,
        None => mix::file_type(folder.float_type().name())?,
    };
    let mut targets = match args.mmproj {
        true => folder.encoder_targets(file.base)?,
        false => targets(&folder, file, &[], None)?,
    };
    check_without_importance(&folder, file, &targets)?;
    let is_float = file.base.block_len() == 1;
    let mut is_mxfp4 = false;
    for (tensor, target) in folder.tensors().iter().zip(&mut targets).filter(|_| is_float && !args.mmproj) {
        // As llama.cpp's converter has it: what was published in MXFP4 stays that, and the gate of a shared expert is
        // a vector.
        if tensor.dtype == WeightType::MXFP4 {
            target.dtype = WeightType::MXFP4;
            is_mxfp4 = true;
        } else if tensor.name.ends_with("ffn_gate_inp_shexp.weight") {
            target.dtype = WeightType::F32;
        }
    }
    let file = if is_mxfp4 { mix::file_type("MXFP4")? } else { file };
    let job = Job { source: &folder, targets, file_type: file.id, keys: Vec::new(), threads };
    if !is_float {
        job.check(args.allow_requantize)?;
    }
    let output = &args.output;
    ensure!(!output.is_dir(), "output path {} is a directory", output.display());
    ensure!(!is_same(input, output), "failed to write {}: it is the input file", output.display());
    let bar = machine::weights_progress(folder.tensors().iter().map(|t| t.len() as u64).sum())?;
    let losses = job.write(output, &bar).with_context(|| format!("failed to convert {}", input.display()))?;
    bar.finish_and_clear();
    if !args.mmproj && folder.has_encoder() {
        out::note!("moebius: the image encoder is not in {}; --mmproj writes it, to another file", output.display());
    }
    report(&job, file, Some(&losses), &[], args.json)
}

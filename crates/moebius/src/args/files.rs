//! Flags of the commands that fetch, make and compare files of weights.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::parse::{parse_bytes, parse_kl};
use super::{BackendKind, EngineArgs, ModelArgs};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  moebius compare -m model-bf16.gguf -m model-q4_k_m.gguf -f text
  moebius compare -m model.gguf -m model.gguf --other-backend cuda -f text")]
pub struct CompareArgs {
    /// Two models of one vocabulary: the base, then what is measured against it
    #[arg(short, long = "model", value_name = "PATH|NAME", required = true)]
    pub models: Vec<PathBuf>,
    /// Text
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Stop after this many windows
    #[arg(long, value_name = "N")]
    pub chunks: Option<usize>,
    /// Backend of the second model; that of the first when left out
    #[arg(long, value_enum)]
    pub other_backend: Option<BackendKind>,
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  moebius imatrix -m model-bf16.gguf -f text -o imatrix.gguf

The file has llama.cpp's GGUF form. Experts that the text never reaches are listed, and have a count of 0 in the file.")]
pub struct ImatrixArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text, like what the model is to be used for
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Read the names of special tokens in the text as those tokens
    #[arg(long)]
    pub parse_special: bool,
    /// Stop after this many windows
    #[arg(long, value_name = "N")]
    pub chunks: Option<usize>,
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  moebius quantize model-bf16.gguf model-q4_k_m.gguf --type Q4_K_M
  moebius quantize Qwen3-30B-A3B/ model-q4_k_m.gguf --type Q4_K_M    # from a folder, in one pass
  moebius quantize model-bf16.gguf out.gguf --type Q4_K_M --imatrix imatrix.gguf --tensor 'ffn_down_exps=Q6_K'
  moebius quantize model-bf16.gguf --type IQ4_XS --dry-run
  moebius quantize model-bf16.gguf out.gguf --target-size 12G --imatrix imatrix.gguf
  moebius quantize model-bf16.gguf out.gguf --target-kl 0.02 -f text

Types: IQ1_S IQ1_M TQ1_0 TQ2_0 IQ2_XXS IQ2_XS IQ2_S IQ2_M Q2_K_S Q2_K IQ3_XXS IQ3_XS Q3_K_S IQ3_S IQ3_M Q3_K_M Q3_K_L
MXFP4 NVFP4 IQ4_XS IQ4_NL Q4_0 Q4_1 Q4_K_S Q4_K_M Q5_0 Q5_1 Q5_K_S Q5_K_M Q6_K Q8_0 BF16 F16 F32. IQ1_S to Q2_K_S,
IQ3_XXS and IQ3_XS want --imatrix; TQ1_0 and TQ2_0 are for models that were trained on three values. Which matrices get
more bits than the name says is as in llama.cpp; rows whose length the blocks do not divide get the nearest type of
32-blocks. Weights that are NaN or infinite are refused.")]
pub struct QuantizeArgs {
    /// GGUF file (any part of a split one) or model folder, best of F32, F16 or BF16
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// GGUF file to write; one that is there is replaced when the new one is whole
    #[arg(value_name = "OUT", required_unless_present = "dry_run")]
    pub output: Option<PathBuf>,
    /// Kind of file, see below
    #[arg(long = "type", value_name = "TYPE", required_unless_present_any = ["target_size", "target_kl"])]
    pub dtype: Option<String>,
    /// In place of a kind: a file of at most this size (12G, 800MB, 7.5GiB), with the types that measured errors of
    /// each matrix call for: Q2_K to Q8_0, with --imatrix IQ2_XXS to IQ3_S too
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "dtype")]
    pub target_size: Option<usize>,
    /// In place of a kind: the smallest file, with types as for a size, whose mean KL divergence from IN on a text is
    /// at most this (nats, as `moebius compare` measures it). Up to 8 files are tried, one at a time, beside OUT
    #[arg(
        long, value_name = "KL", value_parser = parse_kl, requires = "file", allow_negative_numbers = true,
        conflicts_with_all = ["dtype", "target_size", "dry_run"]
    )]
    pub target_kl: Option<f64>,
    /// Text for --target-kl
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Stop after this many windows of the text (--target-kl)
    #[arg(long, value_name = "N")]
    pub chunks: Option<usize>,
    /// Tokens of a window of the text; 512 when left out (--target-kl)
    #[arg(short, long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Backend that computes the text; the CPU when left out (--target-kl)
    #[arg(long, value_enum)]
    pub backend: Option<BackendKind>,
    /// Importances of columns, as `moebius imatrix` and llama.cpp's programs write them
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,
    /// Weight type of the matrices whose name a regular expression matches; the first that matches counts
    #[arg(long, value_name = "PATTERN=TYPE", value_parser = crate::quantize::mix::parse_override)]
    pub tensor: Vec<crate::quantize::mix::Override>,
    /// Take weights that are quantized already, which loses more than starting from the original
    #[arg(long)]
    pub allow_requantize: bool,
    /// Print sizes by type and write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Threads; all cores when left out. The file is the same whatever their number
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Form {
    Gguf,
    Mlx,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  moebius convert Qwen3-30B-A3B/ qwen3.gguf                    # the folder's own float type
  moebius convert Qwen3-30B-A3B/ qwen3.gguf --type Q8_0
  moebius convert qwen3.gguf qwen3-4bit/ --to mlx --bits 4 --group-size 64

Folders: Hugging Face's and MLX's, of every architecture that runs; F32, F16, BF16, FP8 with a scale a block, MXFP4,
affine, GPTQ and AWQ of 4 bits, compressed-tensors' pack-quantized (4 bits) and float-quantized. Types of GGUF files
are those of `moebius quantize`.")]
pub struct ConvertArgs {
    /// Model folder, or GGUF file (any part of a split one)
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// File or folder to write; a file that is there is replaced when the new one is whole
    #[arg(value_name = "OUT")]
    pub output: PathBuf,
    /// Form to write; the other one than that of IN when left out
    #[arg(long, value_enum)]
    pub to: Option<Form>,
    /// Kind of GGUF file; the folder's own float type when left out
    #[arg(long = "type", value_name = "TYPE")]
    pub dtype: Option<String>,
    /// Bits of the matrices in an MLX folder: 2, 3, 4, 5, 6 or 8; bf16 when left out
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=8))]
    pub bits: Option<u8>,
    /// Values that share a scale in an MLX folder: 32, 64 or 128; 64 when left out
    #[arg(long, value_name = "N", requires = "bits")]
    pub group_size: Option<usize>,
    /// Way to cut words (tokenizer.ggml.pre) where the folder's is not recognised
    #[arg(long, value_name = "NAME")]
    pub pre: Option<String>,
    /// Quantize weights that are quantised already, which loses more than starting from the original
    #[arg(long)]
    pub allow_requantize: bool,
    /// Threads; all cores when left out. The file is the same whatever their number
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  moebius pull Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M
  moebius pull mlx-community/Qwen3-30B-A3B-4bit

Files go into Hugging Face's cache (HF_HUB_CACHE, HF_HOME), where its own programs find them too. HF_TOKEN, or the file
that `hf auth login` writes, opens gated models; HF_ENDPOINT names another hub; HF_HUB_OFFLINE=1 forbids the network.")]
pub struct PullArgs {
    /// ORG/REPO, or ORG/REPO:TYPE for the GGUF file of a type
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Branch, tag or commit
    #[arg(long, value_name = "NAME", default_value = "main")]
    pub revision: String,
}

//! Flags of the commands that download, write and compare model files.

use std::path::PathBuf;

use backend::CacheType;
use clap::{Args, ValueEnum};

use super::parse::{parse_bytes, parse_kl};
use super::{BackendKind, EngineArgs, ModelArgs};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  moebius compare -m model-bf16.gguf -m model-q4_k_m.gguf -f text
  moebius compare -m model.gguf -m model.gguf --other-backend cuda -f text")]
pub struct CompareArgs {
    /// Two models with the same vocabulary: the base, then the one to measure against it
    #[arg(short, long = "model", value_name = "PATH|NAME", required = true)]
    pub models: Vec<PathBuf>,
    /// Text file to measure on
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Stop after this many windows
    #[arg(long, value_name = "N")]
    pub chunks: Option<usize>,
    /// Backend of the second model [default: that of the first]
    #[arg(long, value_enum)]
    pub other_backend: Option<BackendKind>,
    /// Type of the KV cache of the second model [default: that of the first]
    #[arg(long, value_name = "TYPE")]
    pub other_cache_type: Option<CacheType>,
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

The file has llama.cpp's GGUF format. Experts that the text never reaches are listed and have a count \
of 0.")]
pub struct ImatrixArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text file that resembles the model's intended use
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Parse the names of special tokens in the text as those tokens
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
  moebius quantize model-bf16.gguf out.gguf --type IQ3_S --imatrix imatrix.gguf
  moebius quantize model-bf16.gguf out.gguf --type Q4_K_M --tensor 'ffn_down_exps=Q6_K'
  moebius quantize model-bf16.gguf --type IQ4_XS --dry-run
  moebius quantize model-bf16.gguf out.gguf --target-size 12G --imatrix imatrix.gguf
  moebius quantize model-bf16.gguf out.gguf --target-kl 0.02 -f text

Types: IQ1_S IQ1_M TQ1_0 TQ2_0 IQ2_XXS IQ2_XS IQ2_S IQ2_M Q2_K_S Q2_K IQ3_XXS IQ3_XS Q3_K_S IQ3_S IQ3_M Q3_K_M \
Q3_K_L MXFP4 NVFP4 IQ4_XS IQ4_NL Q4_0 Q4_1 Q4_K_S Q4_K_M Q5_0 Q5_1 Q5_K_S Q5_K_M Q6_K Q8_0 BF16 F16 F32. IQ1_S to \
Q2_K_S, IQ3_XXS and IQ3_XS require --imatrix; TQ1_0 and TQ2_0 are for models trained with ternary weights. As in \
llama.cpp, some matrices get more bits than the type's name says. Rows whose length is not a multiple of the block get \
the nearest type with blocks of 32. Weights that are NaN or infinite are refused.")]
pub struct QuantizeArgs {
    /// GGUF file (any part of a split one) or model folder, ideally in F32, F16 or BF16
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// GGUF file to write; an existing one is replaced once the new one is complete
    #[arg(value_name = "OUT", required_unless_present = "dry_run")]
    pub output: Option<PathBuf>,
    /// File type, as in llama-quantize's command lines; the same as --type
    #[arg(value_name = "TYPE", conflicts_with_all = ["dtype", "target_size", "target_kl"])]
    pub last: Option<String>,
    /// File type, see below
    #[arg(long = "type", value_name = "TYPE", required_unless_present_any = ["target_size", "target_kl", "last"])]
    pub dtype: Option<String>,
    /// Maximum file size (12G, 800MB, 7.5GiB), instead of --type: types are chosen by each matrix's error, from Q2_K to
    /// Q8_0 and, with --imatrix, IQ2_XXS to IQ3_S
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, conflicts_with = "dtype")]
    pub target_size: Option<usize>,
    /// Maximum mean KL divergence from IN on a text (nats, as `moebius compare` measures it), instead of --type: writes
    /// the smallest file that meets it. Up to 8 files are tried, one at a time, in OUT's folder
    #[arg(
        long, value_name = "KL", value_parser = parse_kl, requires = "file", allow_negative_numbers = true,
        conflicts_with_all = ["dtype", "target_size", "dry_run"]
    )]
    pub target_kl: Option<f64>,
    /// Text file for --target-kl
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Stop after this many windows of the text (--target-kl)
    #[arg(long, value_name = "N")]
    pub chunks: Option<usize>,
    /// Tokens per window of the text (--target-kl) [default: 512]
    #[arg(short, long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Backend that runs the text (--target-kl) [default: cpu]
    #[arg(long, value_enum)]
    pub backend: Option<BackendKind>,
    /// Importance matrix, as written by `moebius imatrix` or llama.cpp's llama-imatrix
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,
    /// Weight type of the matrices whose names match a regular expression; the first match counts
    #[arg(long, value_name = "PATTERN=TYPE", value_parser = crate::quantize::mix::parse_override)]
    pub tensor: Vec<crate::quantize::mix::Override>,
    /// Allow weights that are quantized already, which loses more than starting from the original
    #[arg(long)]
    pub allow_requantize: bool,
    /// Print sizes by type without writing anything
    #[arg(long)]
    pub dry_run: bool,
    /// Number of threads; it does not change the file [default: all cores]
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    Gguf,
    Mlx,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  moebius convert Qwen3-30B-A3B/ qwen3.gguf                    # the folder's own float type
  moebius convert Qwen3-30B-A3B/ qwen3.gguf --type Q8_0
  moebius convert qwen3.gguf qwen3-4bit/ --to mlx --bits 4 --group-size 64
  moebius convert Qwen3-VL-8B/ mmproj-qwen3-vl.gguf --mmproj    # the image encoder, for `run --mmproj`

Folders may come from Hugging Face or MLX, with any supported architecture; weights may be F32, F16, BF16, FP8 with a \
scale per block, MXFP4, MLX's affine types, 4-bit GPTQ and AWQ, and compressed-tensors' pack-quantized (4 bits) and \
float-quantized. The types of GGUF files are those of `moebius quantize`.")]
pub struct ConvertArgs {
    /// Model folder, or GGUF file (any part of a split one)
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// File or folder to write; an existing file is replaced once the new one is complete
    #[arg(value_name = "OUT")]
    pub output: PathBuf,
    /// Output format [default: the opposite of IN's]
    #[arg(long, value_enum)]
    pub to: Option<OutputFormat>,
    /// GGUF file type [default: the folder's own float type]
    #[arg(long = "type", value_name = "TYPE")]
    pub dtype: Option<String>,
    /// Bits per weight in an MLX folder: 2, 3, 4, 5, 6 or 8 [default: bf16, not quantized]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=8))]
    pub bits: Option<u8>,
    /// Number of weights that share a scale in an MLX folder: 32, 64 or 128 [default: 64]
    #[arg(long, value_name = "N", requires = "bits")]
    pub group_size: Option<usize>,
    /// Write the folder's image encoder (mmproj) as F32, F16 or BF16, not its text model
    #[arg(long, conflicts_with_all = ["bits", "group_size", "pre"])]
    pub mmproj: bool,
    /// Pre-tokenizer (tokenizer.ggml.pre), if the folder's is not recognized
    #[arg(long, value_name = "NAME")]
    pub pre: Option<String>,
    /// Allow weights that are quantized already, which loses more than starting from the original
    #[arg(long)]
    pub allow_requantize: bool,
    /// Number of threads; it does not change the file [default: all cores]
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

Files go to Hugging Face's cache (HF_HUB_CACHE, HF_HOME), where Hugging Face tools find them too. HF_TOKEN, or the \
file that `hf auth login` writes, gives access to gated models. HF_ENDPOINT names another hub; HF_HUB_OFFLINE=1 forbids \
the network.")]
pub struct PullArgs {
    /// ORG/REPO, or ORG/REPO:TYPE for the GGUF file of that type
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Branch, tag or commit
    #[arg(long, value_name = "NAME", default_value = "main")]
    pub revision: String,
}

//! The table of flags, from which help, completions and parsing are generated.

mod files;
mod parse;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::version;
pub use files::{CompareArgs, ConvertArgs, Form, ImatrixArgs, PullArgs, QuantizeArgs};
use parse::{parse_bias, parse_bytes, parse_host, parse_origin, parse_pair, parse_temperature};

/// Runs mixture-of-experts language models on the machine you have.
#[derive(Debug, Parser)]
#[command(
    name = "moebius",
    version = version::short(),
    long_version = version::long(),
    propagate_version = true,
    max_term_width = 100,
    arg_required_else_help = true,
    after_help = "Every flag can be set by a variable (MOEBIUS_TOP_K=20 is --top-k 20) and in \
                  ~/.config/moebius/config.toml (top-k = 20)."
)]
pub struct Cli {
    /// File with flags, by command and model; ~/.config/moebius/config.toml when left out
    #[arg(long, global = true, value_name = "FILE", help_heading = "Settings")]
    pub config: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer one prompt; text streams to stdout
    Run(RunArgs),
    /// Chat with the model: history, /reset /system /save /regen /quit
    Chat(ChatArgs),
    /// Serve the model to many clients: the APIs of OpenAI, Anthropic and Ollama over HTTP
    Serve(ServeArgs),
    /// Measure prompt and decode speed, with llama-bench's rows
    Bench(BenchArgs),
    /// Show the contents of a model file, without reading its weights
    Inspect(InspectArgs),
    /// Print what the engine computes, where data resides, and the memory it needs
    Plan(PlanArgs),
    /// Write the logits of a token sequence, or compare them with golden ones
    Logits(LogitsArgs),
    /// Convert text from stdin (or a file) to token ids
    Tokenize(TokenizeArgs),
    /// Render messages with the model's chat template
    Render(RenderArgs),
    /// Measure perplexity on a text, by llama-perplexity's method
    Perplexity(PerplexityArgs),
    /// Measure what a model lost against another: KL divergence, same top token, perplexities
    Compare(CompareArgs),
    /// Sum up which columns of the matrices a text makes use of, for `quantize --imatrix`
    Imatrix(ImatrixArgs),
    /// Write a GGUF file of smaller weight types
    Quantize(QuantizeArgs),
    /// Write a model folder as a GGUF file, or a GGUF file as an MLX folder
    Convert(ConvertArgs),
    /// Fetch a model from Hugging Face into its cache, where `-m` finds it
    Pull(PullArgs),
    /// List the models that Hugging Face's, LM Studio's and Ollama's programs have fetched to this machine
    #[command(aliases = ["list", "ls"])]
    Models(ModelsArgs),
    /// List the GPUs that can compute, or say why one cannot
    Devices,
    /// Ask a running server whether it is well: the exit status says so
    Health(HealthArgs),
    /// Write manual pages into a folder
    Man {
        /// Folder, which is made if it is not there
        folder: PathBuf,
    },
    /// Print a completion script for a shell
    Completions {
        /// Shell to complete for
        shell: clap_complete::Shell,
    },
    /// Try a grammar that another process of this program is about to compile
    #[command(hide = true)]
    TryGrammar,
}

/// The model and its source.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// GGUF file (any part of a split one), MLX or safetensors folder, or the name of a model that `moebius models`
    /// lists; the embedded model when left out
    #[arg(short, long, value_name = "PATH|NAME")]
    pub model: Option<PathBuf>,
}

/// How a conversation becomes a prompt.
#[derive(Debug, Clone, Args)]
pub struct TemplateArgs {
    /// Chat template (Jinja) to use instead of the model's
    #[arg(long, value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// Whether the model thinks before it answers, where its template has a switch for it
    #[arg(long, value_enum, value_name = "on|off")]
    pub think: Option<Switch>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

/// How a step is computed.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct StepArgs {
    /// Instruction set of the CPU backend; the best one present when left out
    #[arg(long, value_enum)]
    pub isa: Option<IsaArg>,
    /// Where memory and threads go on a machine of several NUMA nodes; to wherever the system puts them when left out
    #[arg(long, value_enum, value_name = "WHERE")]
    pub numa: Option<NumaArg>,
    /// Element type of the KV cache (the reference backend always keeps f32)
    #[arg(long, value_enum, default_value_t)]
    pub cache_type: CacheArg,
    /// Weights to copy into memory with pages of 2 MB
    #[arg(long, value_enum, default_value_t)]
    pub copy_weights: CopyArg,
    /// Memory that the whole process stays below, weights included: 12G (powers of ten) or 12GiB (of two). Experts that
    /// do not fit are read from disk when they are wanted. What is free, less a margin, when left out; then the system
    /// may evict weights
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory: Option<usize>,
    /// Memory of an NVIDIA GPU to stay below, the driver's share and all models of a server included (--backend cuda).
    /// Routed experts that do not fit stay in host memory: the CPU computes them, and for long prompts they are copied
    /// to the GPU. What is free when left out
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub gpu_memory: Option<usize>,
    /// When routed experts that are used most move to the GPU, where it does not hold all of them: the last digits of
    /// results then depend on which have moved
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    pub hot_experts: MovesArg,
    /// Maximum number of tokens computed in one step; 512 when left out, more with CUDA (2048) and where experts are
    /// read from disk
    #[arg(short, long, value_name = "N")]
    pub batch: Option<usize>,
}

/// Where memory and threads go on a machine of several NUMA nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NumaArg {
    /// To all nodes: pages in turn, threads evenly. Pages of a file that are cached already stay where they are, and
    /// --copy-weights all copies them
    Distribute,
    /// To the node that the program starts on, memory of others where that is full
    Isolate,
    /// To where numactl has put them
    Numactl,
}

/// When experts move to the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MovesArg {
    /// As long as that is measured to be faster
    #[default]
    Auto,
    /// Whole layers stay where they are: the same run gives the same bits
    Never,
    /// From the first tokens on
    Always,
}

impl StepArgs {
    /// The maximum number of tokens of a step of a backend where all weights are in memory.
    pub fn batch(&self, backend: BackendKind) -> usize {
        self.batch.unwrap_or_else(|| if backend == BackendKind::Cuda { 2048 } else { 512 })
    }
}

/// Settings of the engine.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Threads; all cores when left out
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// Context in tokens; when left out the trained context, at most 8192 and what fits in memory
    #[arg(short, long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Backend that computes; when left out run, chat, serve and bench take an NVIDIA GPU where there is one and the
    /// model fits, all else the CPU
    #[arg(long, value_enum)]
    pub backend: Option<BackendKind>,
    /// CUDA device that computes, by its number in `moebius devices`; the first when left out
    #[arg(long, value_name = "N")]
    pub device: Option<usize>,
    #[command(flatten)]
    pub step: StepArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// The plan interpreter in plain f32 on dequantised weights: slow, the reference for tests
    Reference,
    /// The CPU kernels
    Cpu,
    /// An NVIDIA GPU
    Cuda,
    /// The GPU of a Mac with Apple silicon (never tried on one)
    Metal,
    /// The first of metal, cuda and cpu that is there and that the model fits
    Auto,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum IsaArg {
    Scalar,
    Avx2,
    Avx512,
    Amx,
    Neon,
    I8mm,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum CopyArg {
    /// `dense` where the file is mapped in small pages and memory is free, `none` otherwise
    #[default]
    Auto,
    /// Read all weights from the mapped file
    None,
    /// Copy the weights that every token reads
    Dense,
    /// Copy the experts too
    All,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum CacheArg {
    #[default]
    F16,
    F32,
}

/// Sampling parameters. Flags left out take the model's defaults.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Temperature; 0 always takes the likeliest token
    #[arg(long, visible_alias = "temp", value_name = "T", value_parser = parse_temperature)]
    pub temperature: Option<f32>,
    /// Width of the dynamic temperature range, 0 is off
    #[arg(long, value_name = "R")]
    pub dynatemp_range: Option<f32>,
    /// Exponent of the dynamic temperature
    #[arg(long, value_name = "E")]
    pub dynatemp_exponent: Option<f32>,
    /// Keep the K likeliest tokens, 0 keeps all
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Keep the likeliest tokens that together reach probability P
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Drop tokens below P times the likeliest one's probability
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Locally typical sampling, 1 is off
    #[arg(long, value_name = "P")]
    pub typical: Option<f32>,
    /// Keep logits within N standard deviations of the best; below 0 is off
    #[arg(long, value_name = "N")]
    pub top_n_sigma: Option<f32>,
    /// Probability of excluding top choices
    #[arg(long, value_name = "P")]
    pub xtc_probability: Option<f32>,
    /// Threshold above which a token counts as a top choice
    #[arg(long, value_name = "P")]
    pub xtc_threshold: Option<f32>,
    /// Divide the logits of repeated tokens by this, 1 is off
    #[arg(long, value_name = "F")]
    pub repeat_penalty: Option<f32>,
    /// Number of last tokens that the penalties cover
    #[arg(long, value_name = "N")]
    pub repeat_last_n: Option<usize>,
    /// Penalty subtracted per occurrence
    #[arg(long, value_name = "F")]
    pub frequency_penalty: Option<f32>,
    /// Penalty subtracted once if the token occurred
    #[arg(long, value_name = "F")]
    pub presence_penalty: Option<f32>,
    /// DRY: strength of the penalty on repeated sequences, 0 is off
    #[arg(long, value_name = "F")]
    pub dry_multiplier: Option<f32>,
    /// DRY: base of the growth with length
    #[arg(long, value_name = "F")]
    pub dry_base: Option<f32>,
    /// DRY: longest repetition without a penalty
    #[arg(long, value_name = "N")]
    pub dry_allowed_length: Option<usize>,
    /// Mirostat version, 0 is off
    #[arg(long, value_name = "0|1|2", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2))]
    pub mirostat: u8,
    /// Mirostat's target surprise, in bits
    #[arg(long, value_name = "TAU")]
    pub mirostat_tau: Option<f32>,
    /// Mirostat's learning rate
    #[arg(long, value_name = "ETA")]
    pub mirostat_eta: Option<f32>,
    /// Add BIAS to the logit of token ID; may be given several times
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the random numbers; from the clock when left out
    #[arg(short, long, value_name = "N")]
    pub seed: Option<u64>,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct RunArgs {
    /// Prompt; stdin when left out and stdin is not a terminal
    #[arg(value_name = "PROMPT")]
    pub text: Option<String>,
    /// The prompt, as a flag
    #[arg(short, long, value_name = "PROMPT", conflicts_with = "text")]
    pub prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["text", "prompt"])]
    pub file: Option<PathBuf>,
    /// System message (chat prompts only)
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// Pass the prompt to the model unchanged, without the chat template
    #[arg(long)]
    pub raw: bool,
    /// Maximum number of tokens to generate; without it, until the model ends or the context is full
    #[arg(short, long, value_name = "N")]
    pub n_predict: Option<usize>,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Continue past the model's end-of-text token
    #[arg(long)]
    pub ignore_eos: bool,
    /// Constrain the answer to the JSON schema in this file
    #[arg(long, value_name = "FILE", group = "form")]
    pub json_schema: Option<PathBuf>,
    /// Objects of the schema may have properties that it does not name, where it does not forbid them
    #[arg(long, requires = "json_schema")]
    pub open_objects: bool,
    /// Constrain the answer to the grammar in this file: llguidance's variant of Lark, or llama.cpp's GBNF
    #[arg(long, value_name = "FILE", group = "form")]
    pub grammar: Option<PathBuf>,
    /// Constrain the answer to a regular expression
    #[arg(long, value_name = "REGEX", group = "form")]
    pub regex: Option<String>,
    /// Do not print the summary line, nor the thought when stdout is no terminal
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Fetch a model of Hugging Face's that is not here (ORG/REPO:TYPE); on a terminal the question is asked anyway
    #[arg(long)]
    pub pull: bool,
    #[command(flatten)]
    pub template: TemplateArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct ChatArgs {
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Maximum number of tokens of an answer
    #[arg(short, long, value_name = "N")]
    pub n_predict: Option<usize>,
    /// Do not print the summary line after each answer
    #[arg(short, long)]
    pub quiet: bool,
    /// Do not keep what is typed for later starts (~/.local/state/moebius/history), nor show what was kept
    #[arg(long)]
    pub no_history: bool,
    /// Show answers on a terminal as they are written: lines not wrapped, Markdown's marks left in
    #[arg(long)]
    pub no_markdown: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Fetch a model of Hugging Face's that is not here (ORG/REPO:TYPE); on a terminal the question is asked anyway
    #[arg(long)]
    pub pull: bool,
    #[command(flatten)]
    pub template: TemplateArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object per line
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct ServeArgs {
    /// Address to listen on; a non-loopback address admits other machines
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = parse_host)]
    pub host: std::net::IpAddr,
    /// Port; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// File with the API keys that clients must send, one per line; when left out, none is needed
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Answers computed at a time for each model; 16 (4 of several models), or as many as memory holds, when left out
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub parallel: Option<u16>,
    /// Answers that may wait beyond those; more are refused with 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_queue: u16,
    /// Number of cache positions that all answers share; when left out, a whole context each where memory allows
    #[arg(long, value_name = "N")]
    pub cache_tokens: Option<usize>,
    /// Folder that keeps prompt caches over restarts (CPU backend). Texts can be guessed from its files: it is made for
    /// its owner alone
    #[arg(long, value_name = "FOLDER")]
    pub cache_dir: Option<PathBuf>,
    /// Maximum size of that folder; what was used least recently is deleted
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "4G")]
    pub cache_disk: usize,
    /// Chat template (Jinja) to use instead of the model's
    #[arg(long, value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// Name of the one model in answers; the file's when left out
    #[arg(long, value_name = "NAME")]
    pub alias: Option<String>,
    /// Allow web pages of this origin to call the server (* is any); may be given several times
    #[arg(long, value_name = "ORIGIN", value_parser = parse_origin)]
    pub cors: Vec<String>,
    /// Serve requests for this host name too (and for no others than those named and this machine's); may be given
    /// several times. Without it a server without keys on a loopback address answers to this machine's names only
    #[arg(long, value_name = "NAME")]
    pub allowed_host: Vec<String>,
    /// Seconds that running answers have to finish when the server is stopped
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub drain_seconds: u64,
    /// Format of the log on stderr
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Minimum level of log messages
    #[arg(long, value_enum, default_value_t = LogLevel::Info)]
    pub log_level: LogLevel,
    /// Model, as in `run`; may be given several times. Several are loaded when requests name them, within --memory and
    /// --gpu-memory; those unused for longest make room
    #[arg(short, long, value_name = "PATH|NAME")]
    pub model: Vec<PathBuf>,
    /// Serve every model in this folder too
    #[arg(long, value_name = "FOLDER")]
    pub models: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchFormat {
    Md,
    Json,
    Jsonl,
    Csv,
}

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Model to measure, as in `run`; may be given several times
    #[arg(short, long, value_name = "PATH|NAME")]
    pub model: Vec<PathBuf>,
    /// Prompt lengths to measure, 0 for none
    #[arg(short = 'p', long, value_name = "N,..", value_delimiter = ',', default_values_t = [512])]
    pub n_prompt: Vec<usize>,
    /// Numbers of decoded tokens to measure, 0 for none
    #[arg(short, long, value_name = "N,..", value_delimiter = ',', default_values_t = [128])]
    pub n_gen: Vec<usize>,
    /// A prompt of N tokens and M tokens decoded behind it, measured together; may be given several times
    #[arg(long, value_name = "N,M", value_parser = parse_pair)]
    pub pg: Vec<(usize, usize)>,
    /// Tokens already in the context
    #[arg(short, long, value_name = "N,..", value_delimiter = ',', default_values_t = [0])]
    pub depth: Vec<usize>,
    /// Numbers of sequences that decode together
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [1])]
    pub parallel: Vec<usize>,
    /// Numbers of threads to measure with; all cores when left out
    #[arg(short, long, value_name = "N,..", value_delimiter = ',')]
    pub threads: Vec<usize>,
    /// What computes; when left out an NVIDIA GPU where there is one and the model fits, else the CPU
    #[arg(long, value_enum)]
    pub backend: Option<BackendKind>,
    /// CUDA device that computes, by its number in `moebius devices`; the first when left out
    #[arg(long, value_name = "N")]
    pub device: Option<usize>,
    /// Repetitions
    #[arg(short, long, value_name = "N", default_value_t = 5)]
    pub repetitions: usize,
    /// Format of the table
    #[arg(short, long, value_enum, default_value_t = BenchFormat::Md)]
    pub output: BenchFormat,
    /// Print the time of a step op by op
    #[arg(short, long)]
    pub verbose: bool,
    /// Write the experts of every decoded token to a file, for `moebius plan --routes`
    #[arg(long, value_name = "FILE")]
    pub trace_experts: Option<PathBuf>,
    /// Temperature at which tokens are decoded; 0 takes the best, which a model of random weights soon repeats
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temp: f32,
    #[command(flatten)]
    pub step: StepArgs,
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// GGUF file, or MLX or safetensors folder; the embedded model when left out
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    /// List all metadata
    #[arg(long)]
    pub metadata: bool,
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ModelsArgs {
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct HealthArgs {
    /// Address that the server listens on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = parse_host)]
    pub host: std::net::IpAddr,
    /// Port
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// Ask whether it takes requests (/ready), not only whether it lives (/health)
    #[arg(long)]
    pub ready: bool,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print the plan as the architecture wrote it, before fusion
    #[arg(long)]
    pub unfused: bool,
    /// With --backend cuda: compute capability of the GPU, for which the machine needs none: 80, 86, 89, 90, 100 or
    /// 120; that of this machine's when left out
    #[arg(long, value_name = "N")]
    pub sm: Option<u32>,
    /// With --backend cuda: compile the kernels that the model needs into a folder, for machines without NVRTC
    /// (MOEBIUS_CUBINS names it there)
    #[arg(long, value_name = "FOLDER")]
    pub cubins: Option<PathBuf>,
    /// Predict from recorded experts (`moebius bench --trace-experts`) how many are in memory under any budget
    #[arg(long, value_name = "FILE")]
    pub routes: Option<PathBuf>,
    /// Bytes a second that a disk reads, for a machine that is not this one; measured when left out
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub disk_speed: Option<usize>,
    /// Bytes a second that its memory gives; measured when left out
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory_speed: Option<usize>,
}

#[derive(Debug, Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids
    #[arg(
        long,
        value_name = "ID,..",
        value_delimiter = ',',
        required_unless_present = "golden",
        conflicts_with = "golden"
    )]
    pub tokens: Vec<u32>,
    /// Write the logits of every position here, safetensors, array `logits` [n, vocab] f32
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Compare with the arrays of this safetensors file (tokens, logits, greedy)
    #[arg(long, value_name = "FILE")]
    pub golden: Option<PathBuf>,
    /// Array of the golden file to compare with
    #[arg(long, value_name = "NAME", default_value = "logits", requires = "golden")]
    pub array: String,
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Args)]
pub struct TokenizeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Read the text from a file
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Print a JSON array of ids
    #[arg(long)]
    pub json: bool,
    /// Add the tokens the model wants at the start and the end
    #[arg(long)]
    pub add_special: bool,
    /// Read the names of special tokens in the text as those tokens
    #[arg(long)]
    pub parse_special: bool,
    /// Turn ids on stdin (separated by spaces, commas or lines) back into text
    #[arg(long)]
    pub decode: bool,
}

#[derive(Debug, Args)]
pub struct RenderArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Template to use instead of the model's
    #[arg(long, value_name = "FILE")]
    pub template: Option<PathBuf>,
    /// JSON: an array of messages, or an object with messages, tools, add_generation_prompt, kwargs, bos_token,
    /// eos_token, now; - is stdin
    #[arg(long, value_name = "FILE")]
    pub messages: PathBuf,
    /// Do not add the opening of an answer
    #[arg(long)]
    pub no_generation_prompt: bool,
    /// Print {"text": ..} or {"error": ..}
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct PerplexityArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Stop after this many windows
    #[arg(long, value_name = "N")]
    pub chunks: Option<usize>,
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

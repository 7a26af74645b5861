//! The table of flags, from which help, completions and parsing are generated.

mod devices;
mod drafts;
mod files;
mod parse;
mod sampling;

use std::path::PathBuf;

use backend::CacheType;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::version;
pub use devices::DeviceList;
pub use drafts::{DraftArg, DraftArgs};
pub use files::{CompareArgs, ConvertArgs, ImatrixArgs, OutputFormat, PullArgs, QuantizeArgs};
use model::arch::Stretch;
use parse::{
    parse_bytes, parse_devices, parse_host, parse_image_tokens, parse_origin, parse_pair, parse_server, parse_stretch,
};
pub use sampling::SamplingArgs;

/// Run mixture-of-experts language models on your own machine.
#[derive(Debug, Parser)]
#[command(
    name = "moebius",
    version = version::short(),
    long_version = version::long(),
    propagate_version = true,
    max_term_width = 100,
    arg_required_else_help = true,
    after_help = "Every flag can also be set by an environment variable (MOEBIUS_TOP_K=20 is --top-k 20) and in \
                  ~/.config/moebius/config.toml (top-k = 20)."
)]
pub struct Cli {
    /// File with flags, by command and model [default: ~/.config/moebius/config.toml]
    #[arg(long, global = true, value_name = "FILE", help_heading = "Settings")]
    pub config: Option<PathBuf>,
    /// Folder with kernel sources to compile instead of the embedded ones
    #[arg(long, global = true, hide = true, value_name = "FOLDER")]
    pub kernels: Option<PathBuf>,
    /// Folder with kernels that `plan --cubins` compiled [default: `cuda` next to the program]
    #[arg(long, global = true, hide = true, value_name = "FOLDER", env = "MOEBIUS_CUBINS")]
    pub compiled_kernels: Option<PathBuf>,
    /// Older compute capability whose kernels to run, e.g. 80, for tests of them
    #[arg(long, global = true, hide = true, value_name = "N")]
    pub cuda_arch: Option<u32>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer one prompt; the text streams to stdout
    Run(RunArgs),
    /// Chat with the model: history, /reset /system /save /regen /quit
    Chat(ChatArgs),
    /// Serve models over HTTP with the APIs of OpenAI, Anthropic and Ollama
    Serve(ServeArgs),
    /// Measure prompt and decode speed, in llama-bench's rows
    Bench(BenchArgs),
    /// Show the contents of a model file, without reading its weights
    Inspect(InspectArgs),
    /// Print what the engine computes, where its data resides, and how much memory it needs
    Plan(PlanArgs),
    /// Write the logits of a token sequence, or compare them with golden logits
    Logits(LogitsArgs),
    /// Convert text from stdin (or a file) to token ids
    Tokenize(TokenizeArgs),
    /// Render messages with the model's chat template
    Render(RenderArgs),
    /// Measure perplexity on a text, by llama-perplexity's method
    Perplexity(PerplexityArgs),
    /// Compare two models on a text: KL divergence, agreement on the top token, perplexities
    Compare(CompareArgs),
    /// Compute an importance matrix from a text, for `quantize --imatrix`
    Imatrix(ImatrixArgs),
    /// Write a GGUF file with smaller weight types
    Quantize(QuantizeArgs),
    /// Convert a model folder to a GGUF file, or a GGUF file to an MLX folder
    Convert(ConvertArgs),
    /// Download a model from Hugging Face into its cache, where `-m` finds it
    Pull(PullArgs),
    /// List models already downloaded by Hugging Face tools, LM Studio or Ollama
    #[command(aliases = ["list", "ls"])]
    Models(ModelsArgs),
    /// List the usable GPUs, and say why others cannot be used
    Devices,
    /// Check a running server; exit status 0 means healthy
    Health(HealthArgs),
    /// Print the settings of a command, and where each comes from
    Config(ConfigArgs),
    /// Write manual pages to a folder
    Man {
        /// Folder, created if missing
        folder: PathBuf,
    },
    /// Print a completion script for a shell
    Completions {
        /// Shell to generate the script for
        shell: clap_complete::Shell,
    },
    /// Compile a grammar on trial for another process of this program
    #[command(hide = true)]
    TryGrammar,
}

/// Choice of the model.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// GGUF file (any part of a split one), MLX or safetensors folder, the name of a model that `moebius models` lists,
    /// or its address at huggingface.co [default: the embedded model]
    #[arg(short, long, value_name = "PATH|NAME")]
    pub model: Option<PathBuf>,
    /// Download the model from Hugging Face if it is missing (ORG/REPO:TYPE); on a terminal, the command asks
    #[arg(long)]
    pub pull: bool,
}

/// Choice of the model where a word by itself can be nothing else.
#[derive(Debug, Clone, Args)]
pub struct NamedArgs {
    /// The model, without -m
    #[arg(value_name = "MODEL")]
    pub named: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// The encoder of a model that sees.
#[derive(Debug, Clone, Args)]
pub struct SightArgs {
    /// File of the model's image encoder [default: a GGUF file called mmproj next to the model's]
    #[arg(long, value_name = "FILE")]
    pub mmproj: Option<PathBuf>,
    /// Maximum number of tokens that an image takes: larger ones are scaled down, as far as the model allows
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = parse_image_tokens)]
    pub image_tokens: usize,
    /// Keep the image encoder on the CPU where a GPU runs the model
    #[arg(long)]
    pub no_mmproj_offload: bool,
}

impl Default for SightArgs {
    fn default() -> SightArgs {
        SightArgs { mmproj: None, image_tokens: 1024, no_mmproj_offload: false }
    }
}

/// Rendering of a conversation as a prompt.
#[derive(Debug, Clone, Args)]
pub struct TemplateArgs {
    /// Chat template (Jinja) to use instead of the model's
    #[arg(long, value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// Whether the model thinks before it answers, if its template has a switch for it
    #[arg(long, value_enum, value_name = "on|off")]
    pub think: Option<Switch>,
    /// Maximum number of tokens of the model's thought, which is closed then [default: no limit]
    #[arg(long, value_name = "N")]
    pub think_budget: Option<u32>,
}

/// What becomes of a conversation that has grown beyond the context.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum OnFull {
    /// It is refused with 400, as clients that compact conversations expect
    #[default]
    Refuse,
    /// Its oldest turns are left out, and the header x-ignored-fields says so. System messages stay
    Trim,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

/// Settings of a step's computation.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct StepArgs {
    /// NVIDIA GPUs that compute together, by their numbers in `moebius devices`: experts and heads of attention are
    /// shared out among them, for models that one cannot hold and for many sequences. They must be alike and reach each
    /// other's memory
    #[arg(long, value_name = "N,..", value_parser = parse_devices)]
    pub devices: Option<DeviceList>,
    /// Instruction set of the CPU backend [default: the best one available]
    #[arg(long, value_enum)]
    pub isa: Option<IsaArg>,
    /// Placement of memory and threads on a machine with several NUMA nodes [default: left to the system]
    #[arg(long, value_enum, value_name = "WHERE")]
    pub numa: Option<NumaArg>,
    /// Type of the KV cache: f16, f32, q8_0 (blocks of 8 bits in about half of f16's memory, on CPUs and NVIDIA GPUs),
    /// q4_0 (4 bits, in a quarter, on CPUs), or one each for keys and values: k=q8_0,v=q4_0. The reference backend
    /// computes in f32, on numbers rounded to blocks
    #[arg(long, visible_alias = "kv", value_name = "TYPE", default_value_t)]
    pub cache_type: CacheType,
    /// Stretch the context beyond the trained one: yarn=4 (YaRN), linear=4 or dynamic=4 (NTK), four times as long, for
    /// models whose file does not say so; yarn=4,32768 where the context before is not what the file says. Texts of any
    /// length may get worse: leave it off where they fit. dynamic changes nothing where --ctx is within the context
    /// before; beyond, it has the base of the longest context from the start
    #[arg(long, value_name = "RULE=FACTOR[,N]", value_parser = parse_stretch)]
    pub rope_scaling: Option<Stretch>,
    /// Weights to copy into huge pages (2 MB) instead of reading them from the mapped file
    #[arg(long, value_enum, default_value_t)]
    pub copy_weights: CopyArg,
    /// Memory limit for the whole process, weights included: 12G (powers of ten) or 12GiB (powers of two). Experts that
    /// do not fit are read from disk when needed. Without it the system may evict weights [default: what is free, less
    /// a margin]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory: Option<usize>,
    /// Memory limit on an NVIDIA GPU, the driver's share and all models of a server included (--backend cuda). Routed
    /// experts that do not fit stay in host memory: the CPU computes them, and for long prompts they are copied to the
    /// GPU [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub gpu_memory: Option<usize>,
    /// When to move frequently used experts to a GPU that cannot hold all of them. The last digits of results then
    /// depend on which experts have moved
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    pub hot_experts: MovesArg,
    /// Maximum number of tokens computed in one step [default: 512; 2048 with CUDA, up to 8192 where it has memory
    /// enough; more if experts are read from disk]
    #[arg(short, long, value_name = "N")]
    pub batch: Option<usize>,
}

/// Placement of memory and threads on a machine with several NUMA nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NumaArg {
    /// Interleave pages over all nodes and spread threads evenly. Pages of a file that is cached already stay where
    /// they are, unless --copy-weights all copies them
    Distribute,
    /// Run on the starting node; fall back to other nodes when its memory is full
    Isolate,
    /// Keep the placement of numactl
    Numactl,
}

/// Times at which experts move to the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MovesArg {
    /// While it is measured to be faster
    #[default]
    Auto,
    /// Whole layers stay in place: the same run gives the same bits
    Never,
    /// From the first tokens
    Always,
}

/// Settings of the engine.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Number of threads [default: all cores]
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// Context in tokens [default: the trained context, at most 65536 and what fits in memory]
    #[arg(short, long, value_name = "N")]
    pub ctx: Option<usize>,
    /// Backend to use [default: auto for run, chat, serve and bench (an NVIDIA GPU if it can hold the model), cpu for
    /// other commands]
    #[arg(long, value_enum)]
    pub backend: Option<BackendKind>,
    /// CUDA device to use, by its number in `moebius devices` [default: the first]
    #[arg(long, value_name = "N")]
    pub device: Option<usize>,
    #[command(flatten)]
    pub step: StepArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// The plan interpreter in plain f32 on dequantized weights: slow, the reference for tests
    Reference,
    /// The CPU kernels
    Cpu,
    /// An NVIDIA GPU
    Cuda,
    /// The GPU of a Mac with Apple silicon (experimental, untested on real hardware)
    Metal,
    /// The first of metal, cuda and cpu that is available and can hold the model
    Auto,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum IsaArg {
    Scalar,
    Avx2,
    Avx512,
    Neon,
    I8mm,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum CopyArg {
    /// `dense` if the file is mapped in small pages and memory is free, otherwise `none`
    #[default]
    Auto,
    /// Read all weights from the mapped file
    None,
    /// Copy the weights that every token uses
    Dense,
    /// Copy the experts too
    All,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct RunArgs {
    /// Prompt; what comes on stdin, if that is not a terminal, follows it
    #[arg(value_name = "PROMPT")]
    pub text: Option<String>,
    /// The prompt, as a flag
    #[arg(short, long, value_name = "PROMPT", conflicts_with = "text")]
    pub prompt: Option<String>,
    /// Read a text from a file; it follows the prompt after an empty line, and so does what comes on stdin
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// System message (chat prompts only)
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// Pass the prompt to the model unchanged, without the chat template
    #[arg(long)]
    pub raw: bool,
    /// Maximum number of tokens to generate [default: until the model ends or the context is full]
    #[arg(short, long, value_name = "N")]
    pub n_predict: Option<usize>,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Continue past the model's end-of-text token
    #[arg(long)]
    pub ignore_eos: bool,
    /// Constrain the answer to a JSON schema: a file, or the schema itself ({..})
    #[arg(long, value_name = "FILE|JSON", group = "form")]
    pub json_schema: Option<PathBuf>,
    /// Allow objects to have properties that the schema does not name, unless it forbids them
    #[arg(long, requires = "json_schema")]
    pub open_objects: bool,
    /// Constrain the answer to a grammar: a file, or the grammar itself (root ::= ..), in llguidance's variant of Lark
    /// or llama.cpp's GBNF
    #[arg(long, value_name = "FILE|GRAMMAR", group = "form")]
    pub grammar: Option<PathBuf>,
    /// Constrain the answer to a regular expression
    #[arg(long, value_name = "REGEX", group = "form")]
    pub regex: Option<String>,
    /// Write the experts of every token of prompt and answer with their weights to a file (JSON lines); computes them a
    /// second time
    #[arg(long, value_name = "FILE")]
    pub trace_experts: Option<PathBuf>,
    /// Image that the prompt is about, PNG, JPEG, WebP or GIF; may be given several times, and they come first (CPU
    /// backend)
    #[arg(long, value_name = "FILE")]
    pub image: Vec<PathBuf>,
    #[command(flatten)]
    pub sight: SightArgs,
    /// Do not print the summary line, nor the model's thinking if stdout is not a terminal
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub template: TemplateArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
pub struct ChatArgs {
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Maximum number of tokens per answer
    #[arg(short, long, value_name = "N")]
    pub n_predict: Option<usize>,
    /// Do not print the summary line after each answer
    #[arg(short, long)]
    pub quiet: bool,
    /// Neither save typed lines (~/.local/state/moebius/history) nor offer those saved before
    #[arg(long)]
    pub no_history: bool,
    /// Print answers as the model writes them: Markdown unrendered, lines unwrapped
    #[arg(long)]
    pub no_markdown: bool,
    #[command(flatten)]
    pub sight: SightArgs,
    #[command(flatten)]
    pub model: NamedArgs,
    #[command(flatten)]
    pub template: TemplateArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Human-readable lines
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
    /// Address to listen on; other machines can reach any address but a loopback one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = parse_host)]
    pub host: std::net::IpAddr,
    /// Port; 0 picks a free one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// File with the accepted API keys, one per line: KEY [parallel=N] [requests-per-minute=N] [tokens-per-minute=N]
    /// [# name for the log]; read again when it changes [default: no key is required]
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    #[command(flatten)]
    pub sight: SightArgs,
    /// Maximum number of answers computed at once per model [default: 16 (4 with several models), or what memory holds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub parallel: Option<u16>,
    /// Maximum number of requests that wait beyond those; further ones are refused with 429
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_queue: u16,
    /// Target for the time of a step in milliseconds while answers run: prompts are computed in pieces that keep it, so
    /// that a long one does not stall the answers of others. 0 sets no limit [default: 100; 25 on a GPU; 0 if experts
    /// are read from disk]
    #[arg(long, value_name = "MS")]
    pub step_time: Option<u32>,
    /// Number of KV cache positions that all answers share [default: a whole context each, if memory allows]
    #[arg(long, value_name = "N")]
    pub cache_tokens: Option<usize>,
    /// Folder that keeps prompt caches across restarts (CPU backend). Texts can be inferred from its files, so only its
    /// owner can read it
    #[arg(long, value_name = "FOLDER")]
    pub cache_dir: Option<PathBuf>,
    /// Maximum size of that folder; the least recently used caches are deleted
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, default_value = "4G")]
    pub cache_disk: usize,
    /// Chat template (Jinja) to use instead of the model's
    #[arg(long, value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// Maximum number of tokens of a model's thought, for requests that say nothing of it [default: no limit]
    #[arg(long, value_name = "N")]
    pub think_budget: Option<u32>,
    /// What becomes of a conversation that has grown beyond the context
    #[arg(long, value_enum, default_value_t)]
    pub on_full: OnFull,
    /// Memory for stored responses: /v1/responses then goes on by previous_response_id. The least recently used are
    /// dropped, all of them at the server's end [default: none is stored]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub store_responses: Option<usize>,
    /// Name of the model in answers, if one is served [default: the file's name]. NAME=MODEL gives a model a further name
    /// in requests, in which * stands for any text; may be given several times
    #[arg(long, value_name = "NAME[=MODEL]")]
    pub alias: Vec<String>,
    /// Allow web pages from this origin to call the server (* for any); may be given several times
    #[arg(long, value_name = "ORIGIN", value_parser = parse_origin)]
    pub cors: Vec<String>,
    /// Accept requests for this host name, besides this machine's names; may be given several times. A server on a
    /// loopback address without keys accepts this machine's names only, unless others are allowed
    #[arg(long, value_name = "NAME")]
    pub allowed_host: Vec<String>,
    /// Seconds that running answers have to finish at shutdown
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub drain_seconds: u64,
    /// Format of the log on stderr
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Minimum level of log messages
    #[arg(long, value_enum, default_value_t = LogLevel::Info)]
    pub log_level: LogLevel,
    /// Models, without -m
    #[arg(value_name = "MODEL")]
    pub named: Vec<PathBuf>,
    /// Model, as in `run`; may be given several times. Several models are loaded on demand, within --memory and
    /// --gpu-memory; the least recently used ones make room
    #[arg(short, long, value_name = "PATH|NAME")]
    pub model: Vec<PathBuf>,
    /// Download models from Hugging Face if they are missing (ORG/REPO:TYPE)
    #[arg(long)]
    pub pull: bool,
    /// Unload a model that no request has used for N seconds; the next request loads it again. Requests may say
    /// otherwise (keep_alive) [default: models stay, until others need their memory]
    #[arg(long, value_name = "N")]
    pub sleep_idle_seconds: Option<u64>,
    /// Also serve every model in this folder
    #[arg(long, value_name = "FOLDER")]
    pub models: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

impl ServeArgs {
    /// Returns the models that are named, without -m or by it.
    pub fn models(&self) -> &[PathBuf] {
        if self.named.is_empty() { &self.model } else { &self.named }
    }
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
    /// Models to measure, without -m
    #[arg(value_name = "MODEL")]
    pub named: Vec<PathBuf>,
    /// Model to measure, as in `run`; may be given several times
    #[arg(short, long, value_name = "PATH|NAME")]
    pub model: Vec<PathBuf>,
    /// Download models from Hugging Face if they are missing (ORG/REPO:TYPE)
    #[arg(long)]
    pub pull: bool,
    /// Prompt lengths to measure, 0 for none
    #[arg(short = 'p', long, value_name = "N,..", value_delimiter = ',', default_values_t = [512])]
    pub n_prompt: Vec<usize>,
    /// Numbers of generated tokens to measure, 0 for none
    #[arg(short, long, value_name = "N,..", value_delimiter = ',', default_values_t = [128])]
    pub n_gen: Vec<usize>,
    /// A prompt of N tokens, then M generated tokens, timed as one; may be given several times
    #[arg(long, value_name = "N,M", value_parser = parse_pair)]
    pub pg: Vec<(usize, usize)>,
    /// Tokens already in the context
    #[arg(short, long, value_name = "N,..", value_delimiter = ',', default_values_t = [0])]
    pub depth: Vec<usize>,
    /// Numbers of sequences to decode together
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_values_t = [1])]
    pub parallel: Vec<usize>,
    /// Numbers of threads to measure with [default: all cores]
    #[arg(short, long, value_name = "N,..", value_delimiter = ',')]
    pub threads: Vec<usize>,
    /// Backend to use [default: auto]
    #[arg(long, value_enum)]
    pub backend: Option<BackendKind>,
    /// CUDA device to use, by its number in `moebius devices` [default: the first]
    #[arg(long, value_name = "N")]
    pub device: Option<usize>,
    /// Instead of the table: gaps between the tokens of --parallel running answers while a prompt of N tokens is
    /// computed next to them, and the time to the first token of a short prompt submitted after it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(64..=1 << 20))]
    pub gap: Option<u32>,
    /// Target for the time of a step with --gap, in milliseconds, as in `serve`; 0 sets no limit [default: 100; 25 on a
    /// GPU]
    #[arg(long, value_name = "MS", requires = "gap")]
    pub step_time: Option<u32>,
    /// Instead of the table: the time that the model's image encoder takes for an image
    #[arg(long, value_name = "FILE", conflicts_with = "gap")]
    pub image: Option<PathBuf>,
    /// Number of repetitions
    #[arg(short, long, value_name = "N", default_value_t = 5)]
    pub repetitions: usize,
    /// Format of the table
    #[arg(short, long, value_enum, default_value_t = BenchFormat::Md)]
    pub output: BenchFormat,
    /// Print the time of a step by op
    #[arg(short, long)]
    pub verbose: bool,
    /// Write the experts of every decoded token to a file, for `moebius plan --routes`
    #[arg(long, value_name = "FILE")]
    pub trace_experts: Option<PathBuf>,
    /// Temperature of decoding; at 0 a model with random weights soon repeats itself
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub temp: f32,
    #[command(flatten)]
    pub step: StepArgs,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub sight: SightArgs,
}

impl BenchArgs {
    /// Tokens that a step gives a sequence at most.
    pub fn tokens_per_step(&self) -> usize {
        1 + self.draft.n_max()
    }
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    /// GGUF file, or MLX or safetensors folder [default: the embedded model]
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
    /// List instead which models Moebius runs, and the names of their architectures in GGUF files and folders
    #[arg(long)]
    pub supported: bool,
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Command whose settings are printed
    #[arg(value_name = "COMMAND", default_value = "serve")]
    pub command: String,
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct HealthArgs {
    /// Server, as http://HOST:PORT or HOST:PORT [default: of --host and --port]
    #[arg(value_name = "URL", value_parser = parse_server)]
    pub url: Option<String>,
    /// Address that the server listens on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = parse_host)]
    pub host: std::net::IpAddr,
    /// Port
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// Check whether it accepts requests (/ready), not only whether it is alive (/health)
    #[arg(long)]
    pub ready: bool,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub model: NamedArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print the plan before fusion, as the architecture builds it
    #[arg(long)]
    pub unfused: bool,
    /// Compute capability to plan for (--backend cuda; needs no GPU): 80, 86, 89, 90, 100 or 120 [default: this
    /// machine's GPU]
    #[arg(long, value_name = "N")]
    pub sm: Option<u32>,
    /// Folder to compile the model's kernels into (--backend cuda), for machines without NVRTC: MOEBIUS_CUBINS names it
    /// there
    #[arg(long, value_name = "FOLDER", env = "MOEBIUS_PLAN_CUBINS")]
    pub cubins: Option<PathBuf>,
    /// Predict how many expert reads hit memory under any budget, from a trace (`moebius bench --trace-experts`)
    #[arg(long, value_name = "FILE")]
    pub routes: Option<PathBuf>,
    #[command(flatten)]
    pub draft: DraftArgs,
    /// Disk read speed in bytes per second, to predict for another machine [default: measured]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub disk_speed: Option<usize>,
    /// Memory read speed in bytes per second [default: measured]
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
    /// Safetensors file to write the logits of every position to, as array `logits` [n, vocab] f32
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Safetensors file with arrays to compare with (tokens, logits, greedy)
    #[arg(long, value_name = "FILE")]
    pub golden: Option<PathBuf>,
    /// Array of the golden file to compare with; mtp_logits are those of the model's head that drafts (row t from the
    /// tokens up to t + 1), mtp_logits_N those of its Nth draft
    #[arg(long, value_name = "NAME", default_value = "logits", requires = "golden")]
    pub array: String,
    /// Image of the prompt, PNG, JPEG, WebP or GIF; of several, each stands for the next run of image tokens. Golden
    /// arrays are features.NAME or deepstack_N.NAME, or logits.NAME of the tokens in tokens.NAME
    #[arg(long, value_name = "FILE")]
    pub image: Vec<PathBuf>,
    #[command(flatten)]
    pub sight: SightArgs,
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
    /// Text [default: stdin]
    pub text: Option<String>,
    /// Read the text from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "text")]
    pub file: Option<PathBuf>,
    /// Print a JSON array of ids
    #[arg(long)]
    pub json: bool,
    /// Add the special tokens that the model expects at the start and the end
    #[arg(long)]
    pub add_special: bool,
    /// Parse the names of special tokens in the text as those tokens
    #[arg(long)]
    pub parse_special: bool,
    /// Decode ids from stdin (separated by spaces, commas or newlines) to text
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
    /// JSON file with an array of messages, or an object with messages, tools, add_generation_prompt, kwargs,
    /// bos_token, eos_token, now; - for stdin
    #[arg(long, value_name = "FILE")]
    pub messages: PathBuf,
    /// Do not open an answer at the end
    #[arg(long)]
    pub no_generation_prompt: bool,
    /// Print {"text": ..} or {"error": ..}
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct PerplexityArgs {
    #[command(flatten)]
    pub model: NamedArgs,
    /// Text file to measure on
    #[arg(short, long, value_name = "FILE")]
    pub file: PathBuf,
    /// Stop after this many windows
    #[arg(long, value_name = "N")]
    pub chunks: Option<usize>,
    /// Write the experts of every token with their weights to a file (JSON lines)
    #[arg(long, value_name = "FILE")]
    pub trace_experts: Option<PathBuf>,
    /// Machine-readable output
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

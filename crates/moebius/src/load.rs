//! From a file name to something that runs: checkpoint, plan, program, engine.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use backend::cpu::{CacheType, Copied, Cpu, Isa};
use backend::cuda::Cuda;
use backend::reference::Reference;
use backend::{Backend, Batch, Limits, PAGE, Program, Tables};
use checkpoint::Checkpoint;
use engine::folder;
use engine::formats::Format;
use engine::sampler::{Mirostat, SamplerParams};
use engine::scheduler::{Engine, Options};
use engine::template::{Chat, ChatTemplate};
use engine::tokenizer::{Encode, Tokenizer};
use model::plan::cost::Kind;
use model::plan::{Plan, ValidPlan};
use serde_json::Value;

use crate::args::{BackendKind, CacheArg, CopyArg, EngineArgs, IsaArg, SamplingArgs, StepArgs};
use crate::memory::CacheBytes;
use crate::{embedded, machine};

/// Context when neither the user nor the model asks for less.
const DEFAULT_CTX: usize = 8192;

/// An open model: its header, and what it computes.
pub struct Model {
    pub checkpoint: Arc<Checkpoint>,
    /// As the architecture wrote it; a backend lowers it.
    pub plan: ValidPlan,
    pub embedded: bool,
}

/// Opens the file named, or the embedded model. Reads headers only.
pub fn open(path: Option<&Path>) -> Result<Model> {
    let checkpoint = Arc::new(embedded::open(path)?);
    let plan = model::build(&checkpoint)?;
    Ok(Model { checkpoint, plan, embedded: path.is_none() })
}

/// What decides how a model runs.
#[derive(Clone, Debug)]
pub struct EngineSetup {
    pub threads: Option<usize>,
    pub ctx: Option<usize>,
    pub backend: BackendKind,
    pub step: StepArgs,
    pub prefix_cache: bool,
    /// Most sequences computed at a time.
    pub sequences: usize,
    /// Positions of the cache over all of them; what `sequences` need and memory holds when `None`.
    pub cache_tokens: Option<usize>,
}

impl From<&EngineArgs> for EngineSetup {
    fn from(args: &EngineArgs) -> Self {
        EngineSetup {
            threads: args.threads,
            ctx: args.ctx,
            backend: args.backend,
            step: args.step,
            prefix_cache: true,
            sequences: 1,
            cache_tokens: None,
        }
    }
}

impl EngineSetup {
    /// The backend and the name that tables show for it.
    pub fn backend(&self, checkpoint: &Checkpoint, plan: &Plan) -> Result<(Box<dyn Backend>, String)> {
        if self.backend == BackendKind::Reference {
            return Ok((Box::new(Reference), "reference".into()));
        }
        let cache = match self.step.cache_type {
            CacheArg::F16 => CacheType::F16,
            CacheArg::F32 => CacheType::F32,
        };
        if self.backend == BackendKind::Cuda {
            let cubins = machine::cache_folder().map(|folder| folder.join("cuda"));
            return Ok((Box::new(Cuda { device: 0, cache, cubins, kernels: None }), "CUDA".into()));
        }
        let isa = match self.step.isa {
            None => Isa::best(),
            Some(IsaArg::Scalar) => Isa::Scalar,
            Some(IsaArg::Avx2) => Isa::Avx2,
            Some(IsaArg::Avx512) => Isa::Avx512,
            Some(IsaArg::Neon) => Isa::Neon,
            Some(IsaArg::I8mm) => Isa::I8mm,
        };
        isa.check()?;
        let threads = self.threads.unwrap_or_else(machine::cores);
        ensure!((1..=1024).contains(&threads), "start {threads} threads: use 1 to 1024");
        let copied = self.copied(checkpoint, plan)?;
        Ok((Box::new(Cpu { isa, threads, cache, copied }), format!("CPU {}", isa.name())))
    }

    /// Weights that are worth the memory of a copy, or what was asked for.
    fn copied(&self, checkpoint: &Checkpoint, plan: &Plan) -> Result<Copied> {
        let kinds = plan.weight_bytes();
        let tied = kinds.iter().all(|&(kind, _)| kind != Kind::Output);
        let bytes_of = |copied| -> usize {
            let is_copied = |kind| match kind {
                Kind::Experts => copied == Copied::All,
                Kind::Embed => tied,
                _ => true,
            };
            kinds.iter().filter(|&&(kind, _)| is_copied(kind)).map(|&(_, bytes)| bytes).sum()
        };
        let free = machine::free_memory().unwrap_or(usize::MAX);
        let copied = match self.step.copy_weights {
            CopyArg::None => return Ok(Copied::Nothing),
            CopyArg::Dense => Copied::Dense,
            CopyArg::All => Copied::All,
            CopyArg::Auto => {
                // The cache keeps what was copied until something else wants its place.
                let fits = bytes_of(Copied::Dense).saturating_mul(2) <= free;
                let is_worth_it = fits && machine::lies_in_small_pages(checkpoint);
                return Ok(if is_worth_it { Copied::Dense } else { Copied::Nothing });
            }
        };
        let [wanted, free] = [bytes_of(copied), free].map(|n| n as u64);
        let [w, f] = [wanted, free].map(machine::bytes);
        ensure!(wanted <= free, "copy {w} of weights (--copy-weights): {f} of memory are free");
        Ok(copied)
    }

    /// What the sequences of a model take.
    pub fn cache_bytes(&self, plan: &Plan) -> CacheBytes {
        let element = match (self.backend, self.step.cache_type) {
            (BackendKind::Cpu | BackendKind::Cuda, CacheArg::F16) => 2,
            _ => 4,
        };
        CacheBytes::of(plan, element)
    }

    /// Positions a sequence may have: what was asked for, or what model, habit and memory allow.
    pub fn context(&self, plan: &Plan) -> Result<usize> {
        if let Some(ctx) = self.ctx {
            ensure!((1..=1 << 20).contains(&ctx), "use a context of {ctx}: it must be 1 to {}", 1 << 20);
            return Ok(ctx);
        }
        let habit = plan.n_ctx_train.clamp(PAGE, DEFAULT_CTX);
        Ok(habit.min(self.positions_that_fit(plan, habit).max(PAGE)))
    }

    /// Positions for which the cache may take memory: a quarter of what is free, since the weights want the rest. What
    /// sequences of up to `positions` take however long they are goes off first.
    fn positions_that_fit(&self, plan: &Plan, positions: usize) -> usize {
        let bytes = self.cache_bytes(plan);
        let fixed = bytes.fixed(positions).saturating_mul(self.sequences as u64);
        let fits = |free: usize| ((free as u64 / 4).saturating_sub(fixed) / bytes.position.max(1)) as usize;
        machine::free_memory().map_or(usize::MAX, fits)
    }

    /// Limits for an engine whose sequences have up to `positions`.
    pub fn engine_limits(&self, plan: &Plan, positions: usize) -> Result<Limits> {
        let one = self.limits(plan, positions, self.sequences)?;
        let shared = match self.cache_tokens {
            Some(n) => n.min(1 << 31),
            None => positions.saturating_mul(self.sequences).min(self.positions_that_fit(plan, positions)),
        };
        // A single sequence must always fit: what the engine promises rests on it.
        let n_pages = shared.div_ceil(PAGE).max(one.n_pages);
        let limits = Limits { n_pages, ..one };
        Ok(self.cache_bytes(plan).set_aside(self.sequences, positions, machine::free_memory(), limits))
    }

    /// Limits for one sequence of `positions` without an engine, which keeps all of them.
    pub fn limits(&self, plan: &Plan, positions: usize, max_outputs: usize) -> Result<Limits> {
        ensure!((1..=65536).contains(&self.step.batch), "use a batch of {}: it must be 1 to 65536", self.step.batch);
        let max_tokens = self.step.batch.min(positions.max(1));
        Ok(Limits {
            max_tokens,
            max_outputs: max_outputs.min(max_tokens),
            n_pages: positions.div_ceil(PAGE),
            max_positions: positions,
            n_window_pages: positions.div_ceil(PAGE),
            n_states: usize::from(!plan.states.is_empty()),
        })
    }
}

/// A model behind an engine, ready for requests.
pub struct Session {
    pub engine: Engine,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    /// How the model marks thoughts and calls: by its template, or as Hermes does where that says nothing of calls.
    pub format: Format,
    pub template_knows_tools: bool,
    pub backend: String,
    pub description: String,
    pub n_vocab: usize,
    pub n_params: u64,
    pub size_bytes: u64,
    pub weight_bytes_per_token: u64,
    /// What its sequences take, and what is set aside for them.
    pub cache: CacheBytes,
    pub limits: Limits,
    sampling: folder::Sampling,
    embedded: bool,
}

/// Starts an engine for one conversation at a time.
pub fn start(model: Model, args: &EngineArgs) -> Result<Session> {
    start_with(model, &EngineSetup::from(args))
}

/// Starts an engine.
pub fn start_with(model: Model, setup: &EngineSetup) -> Result<Session> {
    let Model { checkpoint, plan, embedded } = model;
    let tokenizer = Arc::new(Tokenizer::load(&checkpoint)?);
    let template = template(&checkpoint, &tokenizer)?;
    let source = folder::chat_template(&checkpoint)?.unwrap_or_default();
    let template_knows_tools = Format::detect(&source).has_calls();
    let format =
        if template_knows_tools { Format::detect(&source) } else { Format::detect(&format!("{source}<tool_call>")) };
    let sampling = folder::sampling(&checkpoint)?;
    let positions = setup.context(&plan)?;
    let (backend, backend_name) = setup.backend(&checkpoint, &plan)?;
    let limits = setup.engine_limits(&plan, positions)?;
    let plan = backend.lower(plan)?;
    let program = backend.compile(&plan, Arc::clone(&checkpoint), limits)?;
    let options = Options { prefix_cache: setup.prefix_cache, max_running: setup.sequences, ..Options::default() };
    Ok(Session {
        engine: Engine::new(program, tokenizer.clone(), options)?,
        template,
        format,
        template_knows_tools,
        backend: backend_name,
        description: describe(&checkpoint, &plan),
        n_vocab: plan.n_vocab,
        n_params: n_params(&checkpoint),
        size_bytes: checkpoint.data_bytes() as u64,
        weight_bytes_per_token: plan.bytes_per_token() as u64,
        cache: setup.cache_bytes(&plan),
        limits,
        sampling,
        embedded,
        tokenizer,
    })
}

impl Session {
    /// Tokens of a prompt taken as it is; names of special tokens in it count as those tokens.
    pub fn encode_raw(&self, prompt: &str) -> Vec<u32> {
        self.tokenizer.encode(prompt, Encode { add_special: true, parse_special: true })
    }

    /// Tokens of a conversation, the opening of the answer behind it.
    pub fn encode_chat(&self, messages: Vec<Value>) -> Result<Vec<u32>> {
        let template = self.template.as_ref().context("render the conversation: the model has no chat template")?;
        let messages = Value::Array(messages);
        let text = template.render(&Chat::new(&messages))?;
        let mut tokens = self.tokenizer.encode(&text, Encode { add_special: true, parse_special: true });
        // Templates that write the begin-of-text token themselves would get it twice.
        if let Some(bos) = self.tokenizer.bos()
            && tokens.starts_with(&[bos, bos])
        {
            tokens.remove(0);
        }
        Ok(tokens)
    }

    /// Whether a prompt ends inside a thought, so that the answer begins with it.
    pub fn opens_thought(&self, tokens: &[u32]) -> bool {
        // The mark and the blanks behind it are in the last few.
        let tail = &tokens[tokens.len().saturating_sub(16)..];
        self.format.opens_thought(&self.tokenizer.decode(tail))
    }

    /// The model's own sampling.
    pub fn default_sampling(&self) -> SamplerParams {
        // DRY may repeat across the usual breaks between sentences and fields.
        let breakers = ["\n", ":", "\"", "*"].map(|text| self.tokenizer.encode(text, Encode::default()));
        let mut params = SamplerParams { dry_breakers: breakers.to_vec(), ..SamplerParams::default() };
        if self.embedded {
            // What its card recommends.
            (params.temperature, params.top_p, params.min_p, params.top_k) = (0.7, 0.9, 0.05, 0);
        }
        // What its folder recommends.
        let said = &self.sampling;
        params.temperature = said.temperature.unwrap_or(params.temperature);
        params.top_k = said.top_k.map_or(params.top_k, |k| k as usize);
        params.top_p = said.top_p.unwrap_or(params.top_p);
        params.min_p = said.min_p.unwrap_or(params.min_p);
        params.penalty_repeat = said.repetition_penalty.unwrap_or(params.penalty_repeat);
        params
    }

    /// The sampling asked for, over the model's defaults.
    pub fn sampling(&self, args: &SamplingArgs) -> Result<SamplerParams> {
        let mut params = self.default_sampling();
        apply(args, &mut params);
        params.seed = args.seed.unwrap_or_else(clock_seed);
        Ok(params)
    }
}

/// A seed from the clock, for text that differs from run to run.
fn clock_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64
}

/// Puts what the user asked for over the defaults.
fn apply(args: &SamplingArgs, params: &mut SamplerParams) {
    macro_rules! set {
        ($($field:ident = $arg:ident),* $(,)?) => { $(if let Some(value) = args.$arg { params.$field = value; })* };
    }
    set!(
        temperature = temperature,
        dynatemp_range = dynatemp_range,
        dynatemp_exponent = dynatemp_exponent,
        top_k = top_k,
        top_p = top_p,
        min_p = min_p,
        typical_p = typical,
        top_n_sigma = top_n_sigma,
        xtc_probability = xtc_probability,
        xtc_threshold = xtc_threshold,
        penalty_repeat = repeat_penalty,
        penalty_last_n = repeat_last_n,
        penalty_frequency = frequency_penalty,
        penalty_presence = presence_penalty,
        dry_multiplier = dry_multiplier,
        dry_base = dry_base,
        dry_allowed_length = dry_allowed_length,
        mirostat_tau = mirostat_tau,
        mirostat_eta = mirostat_eta,
    );
    params.mirostat = match args.mirostat {
        0 => Mirostat::Off,
        1 => Mirostat::V1,
        _ => Mirostat::V2,
    };
    params.logit_bias.extend_from_slice(&args.logit_bias);
}

/// The model's own chat template, if it has one.
pub fn template(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
    let Some(source) = folder::chat_template(checkpoint)? else { return Ok(None) };
    let token = |id: Option<u32>| {
        let bytes = id.and_then(|id| tokenizer.token_bytes(id)).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    };
    Ok(Some(ChatTemplate::new(&source, &token(tokenizer.bos()), &token(tokenizer.eos()))?))
}

/// Parameters of all tensors.
pub fn n_params(checkpoint: &Checkpoint) -> u64 {
    checkpoint.tensors().iter().map(|t| t.shape.iter().map(|&d| d as u64).product::<u64>()).sum()
}

/// `qwen3moe q4_k`-like: architecture and the weight type most bytes are in.
fn describe(checkpoint: &Checkpoint, plan: &Plan) -> String {
    let mut bytes = std::collections::BTreeMap::new();
    for tensor in checkpoint.tensors() {
        *bytes.entry(tensor.dtype).or_insert(0usize) += tensor.total_bytes();
    }
    let most = bytes.iter().max_by_key(|(_, bytes)| **bytes).map_or("", |(dtype, _)| dtype.name());
    format!("{} {most}", plan.arch)
}

/// One sequence fed to a program token by token, for commands that want logits and not text.
pub struct Sequence {
    program: Box<dyn Program>,
    batch: Batch,
    pages: Vec<u32>,
    position: usize,
}

impl Sequence {
    /// Compiles the model for a sequence of at most `positions`.
    pub fn start(model: &Model, args: &EngineArgs, positions: usize) -> Result<Sequence> {
        let setup = EngineSetup::from(args);
        let (backend, _) = setup.backend(&model.checkpoint, &model.plan)?;
        let limits = setup.limits(&model.plan, positions, usize::MAX)?;
        let plan = backend.lower(model.plan.clone())?;
        let program = backend.compile(&plan, Arc::clone(&model.checkpoint), limits)?;
        Ok(Sequence { program, batch: Batch::default(), pages: (0..limits.n_pages as u32).collect(), position: 0 })
    }

    /// Width of a logits row.
    pub fn n_vocab(&self) -> usize {
        self.program.n_vocab()
    }

    /// Starts over; what the cache holds is overwritten.
    pub fn rewind(&mut self) {
        self.position = 0;
    }

    /// Computes `tokens` after what was fed before; `each` gets every position's logits.
    pub fn feed(&mut self, tokens: &[u32], each: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.feed_from(tokens, self.position, each)
    }

    /// The same, with logits only from position `from` on.
    pub fn feed_from(
        &mut self,
        tokens: &[u32],
        from: usize,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let n_vocab = self.n_vocab();
        for chunk in tokens.chunks(self.program.limits().max_tokens) {
            let start = self.position;
            let skip = from.saturating_sub(start).min(chunk.len());
            self.batch.clear();
            let tables = Tables { pages: &self.pages, window_pages: &self.pages, ..Tables::default() };
            self.batch.push(chunk, start, tables, skip..chunk.len());
            let output = self.program.step(&self.batch)?;
            if let Some(fault) = output.faults.first() {
                return Err((*fault).into());
            }
            for (i, row) in output.logits.chunks_exact(n_vocab).enumerate() {
                each(start + skip + i, row)?;
            }
            self.position += chunk.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_cpu_runs_is_the_fused_plan() {
        let plain = open(None).unwrap().plan;
        let fused = Cpu::default().lower(plain.clone()).unwrap();
        assert!(fused.ops.len() < plain.ops.len(), "{} ops of {}", fused.ops.len(), plain.ops.len());
    }
}

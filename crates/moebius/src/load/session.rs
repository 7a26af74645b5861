//! A model behind an engine, ready for requests.

use std::cell::OnceCell;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use backend::{Footprint, Limits, Part};
use checkpoint::Checkpoint;
use engine::folder;
use engine::formats::{Ask, Format};
use engine::grammar::{Constraint, Grammars, Rule};
use engine::pooling;
use engine::sampler::SamplerParams;
use engine::scheduler::{Engine, Options, Pooling, PromptLookup};
use engine::template::{Chat, ChatTemplate};
use engine::tokenizer::{Encode, Tokenizer};
use model::plan::Plan;
use serde_json::Value;

use super::{EngineSetup, Eyes, Model, Prepared, compile_template, describe, file_type, n_params};
use crate::args::{DraftArg, DraftArgs, EngineArgs, SamplingArgs, Switch, TemplateArgs};
use crate::device::{Chosen, Held};
use crate::memory::{Fit, Units};
use crate::{machine, memory, prompts, sampling};

/// A model behind an engine, ready for requests.
pub struct Session {
    pub engine: Engine,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    /// How the model marks thoughts and calls: by its template, or as Hermes does where that says nothing of calls.
    pub format: Format,
    pub template_knows_tools: bool,
    /// The template has a variable for the effort of reasoning.
    pub template_knows_effort: bool,
    pub backend: String,
    /// What computes in the end.
    pub device: Chosen,
    pub description: String,
    pub arch: String,
    /// `Q4_K_M`, or the weight type that most bytes are in.
    pub file_type: String,
    pub n_vocab: usize,
    pub n_params: u64,
    pub size_bytes: u64,
    pub weight_bytes_per_token: u64,
    /// What one more page or state takes.
    pub units: Units,
    /// What its program takes.
    pub footprint: Footprint,
    /// What it takes in all, by place.
    pub held: Held,
    pub limits: Limits,
    /// Tokens of a context that the model was trained with.
    pub n_ctx_train: usize,
    /// Maximum number of sequences computed at a time.
    pub sequences: usize,
    pub embedded: bool,
    /// What computes where nobody said, and where weights are when experts are streamed.
    pub placement: Vec<String>,
    /// What the user should know before the first answer.
    pub warnings: Vec<String>,
    /// Whether the model thinks first; as its template has it when `None`.
    pub think: Option<bool>,
    /// Maximum number of tokens of a thought.
    pub most_thought: Option<usize>,
    /// Made with the first constraint.
    grammars: OnceCell<Grammars>,
    /// How it makes one vector of a text.
    pub pooling: Pooling,
    /// What it makes of whole texts, where it writes none.
    pub whole: Option<Whole>,
    /// It was trained to say whether a document answers a query.
    pub reranks: bool,
    /// The prompt of such a question, where the file has one.
    pub rerank_template: Option<String>,
    /// How it sees images, where it does.
    pub eyes: Option<Eyes>,
    sampling: SamplerParams,
}

/// Starts an engine for one conversation at a time, on a GPU where there is one.
pub fn start(model: Model, args: &EngineArgs, draft: DraftArgs) -> Result<Session> {
    start_with(model, &EngineSetup::drafting(args, draft)?)
}

/// Starts an engine.
pub fn start_with(model: Model, setup: &EngineSetup) -> Result<Session> {
    let model = model.drafting(setup.head())?;
    let setup = &setup.with_encoder(model.sight.as_ref())?;
    let prepared = setup.prepare(&model.checkpoint, model.plan.clone())?;
    start_prepared(model, setup, prepared)
}

/// Starts an engine of what `setup` has prepared of the model.
pub fn start_prepared(model: Model, setup: &EngineSetup, prepared: Prepared) -> Result<Session> {
    let Model { checkpoint, plan, embedded, template, sight, unseen } = model;
    let tokenizer = Arc::new(Tokenizer::load(&checkpoint)?);
    let source = match template {
        Some(source) => Some(source),
        None => folder::chat_template(&checkpoint)?,
    };
    let template = source.as_deref().map(|source| compile_template(source, &tokenizer)).transpose()?;
    let source = source.unwrap_or_default();
    let template_knows_tools = Format::detect(&source).has_calls();
    let template_knows_effort = source.contains("reasoning_effort");
    let format =
        if template_knows_tools { Format::detect(&source) } else { Format::detect(&format!("{source}<tool_call>")) };
    let sampling = sampling::of_model(&checkpoint)?;
    let free = machine::free_memory();
    let (prepared, program) = setup.compile(&checkpoint, prepared, plan)?;
    let (placement, held) = (prepared.placement(), prepared.held(setup.encoder));
    let eyes = sight.map(|sight| sight.open(setup, prepared.device.kind, &tokenizer)).transpose()?;
    let step_time = prepared.step_time(setup.step_time);
    let Prepared { backend, name, plan, fit, device, draft, .. } = prepared;
    let Fit { limits, sequences, footprint } = fit;
    let beyond = (limits.max_positions > plan.n_ctx_max() && setup.ctx.is_some()).then(|| {
        let (ctx, most) = (limits.max_positions, plan.n_ctx_max());
        format!("the context of {ctx} is beyond the {most} that the model was trained with: text there may be noise")
    });
    let caches = footprint.bytes(|part| matches!(part, Part::Cache | Part::Windows | Part::States));
    let crowded = free.filter(|_| held.gpu == 0).and_then(|free| memory::crowded(caches, free));
    let whole = Whole::of(&plan);
    let text = |key: &str| checkpoint.meta().opt_str(key).ok().flatten().map(str::to_string);
    let options = Options { prefix_cache: setup.prefix_cache, max_running: sequences, step_time, ..Options::default() };
    let mut engine = Engine::new(program, tokenizer.clone(), options)?;
    match &setup.draft.draft {
        DraftArg::Off => {}
        DraftArg::Auto => {
            engine.set_adaptive(true);
            if !engine.set_head(limits.max_draft) {
                engine.set_drafter(Some(Box::new(PromptLookup::default())));
            }
        }
        DraftArg::Ngram => engine.set_drafter(Some(Box::new(PromptLookup::default()))),
        DraftArg::Mtp => {
            ensure!(engine.set_head(limits.max_draft), "failed to draft tokens: {name} has no head for it")
        }
        DraftArg::Model(_) => {
            if let Some(draft) = draft {
                engine.set_draft_model(draft.compile()?, limits.max_draft)?;
            }
            engine.set_adaptive(setup.draft.draft_tokens.is_none());
        }
    }
    if let Some(folder) = &setup.prompts {
        let is_long = plan.long_ropes.as_ref().is_some_and(|long| limits.max_positions > long.n_ctx);
        let rotated = if is_long { " long" } else { "" };
        let how = format!("{} {}{rotated}", backend.name(), setup.step.cache_type);
        let identity = prompts::identity(&checkpoint, &plan, &how)?;
        ensure!(
            engine.set_store(identity, Box::new(folder.open(identity)?)),
            "failed to keep prompts in {} (--cache-dir): {name} cannot save its cache",
            folder.path.display()
        );
    }
    Ok(Session {
        engine,
        template,
        format,
        template_knows_tools,
        template_knows_effort,
        backend: name,
        device: device.kind,
        held,
        description: describe(&checkpoint, &plan, embedded),
        arch: plan.arch.to_string(),
        file_type: file_type(&checkpoint),
        n_vocab: plan.n_vocab,
        n_params: n_params(&checkpoint),
        size_bytes: checkpoint.data_bytes() as u64,
        weight_bytes_per_token: plan.bytes_per_token() as u64,
        units: Units::of(&*backend, &plan, limits.max_draft),
        footprint,
        limits,
        n_ctx_train: plan.n_ctx_train,
        sequences,
        placement,
        warnings: tokenizer.unusable().iter().cloned().chain(beyond).chain(crowded).chain(unseen).collect(),
        think: None,
        most_thought: None,
        grammars: OnceCell::new(),
        pooling: pooling(&checkpoint, whole)?,
        whole,
        reranks: reranks(&checkpoint),
        rerank_template: text("tokenizer.chat_template.rerank"),
        eyes,
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

    /// Text of a conversation, the opening of the answer after it.
    pub fn render(&self, messages: Vec<Value>) -> Result<String> {
        let template =
            self.template.as_ref().context("failed to render the conversation: the model has no chat template")?;
        let messages = Value::Array(messages);
        // Templates have two names for the switch.
        let think = |on: bool| ["enable_thinking", "thinking"].map(|name| (name.to_string(), on.into()));
        let kwargs = self.think.map(|on| think(on).into_iter().collect());
        Ok(template.render(&Chat { kwargs: kwargs.as_ref(), ..Chat::new(&messages) })?)
    }

    /// Returns how it sees images.
    ///
    /// # Errors
    /// It sees none.
    pub fn eyes(&self) -> Result<&Eyes> {
        let eyes = self.eyes.as_ref();
        eyes.with_context(|| format!("failed to show images to {}: it sees none", self.description))
    }

    /// Tokens of a conversation, the opening of the answer after it.
    pub fn encode_chat(&self, messages: Vec<Value>) -> Result<Vec<u32>> {
        let text = self.render(messages)?;
        let mut tokens = self.tokenizer.encode(&text, Encode { add_special: true, parse_special: true });
        // Templates that write the begin-of-text token themselves would get it twice.
        if let Some(bos) = self.tokenizer.bos()
            && tokens.starts_with(&[bos, bos])
        {
            tokens.remove(0);
        }
        Ok(tokens)
    }

    /// Takes what the flags say of thoughts.
    pub fn set_thoughts(&mut self, args: &TemplateArgs) {
        self.think = args.think.map(|switch| switch == Switch::On);
        self.bound_thoughts(args.think_budget.and_then(|n| usize::try_from(n).ok()));
    }

    /// Takes the maximum number of tokens of a thought, with a warning where the template has no thoughts.
    pub fn bound_thoughts(&mut self, most: Option<usize>) {
        self.most_thought = most;
        if most.is_some() && self.template.is_some() && self.format.thought().is_none() {
            self.warnings.push("the chat template has no marks of thoughts: ignoring --think-budget".into());
        }
    }

    /// Returns the constraint of an answer whose content follows `rule`, if one is given, and whose thought is bounded;
    /// `None` where everything is allowed. `opened`: the prompt ends inside a thought.
    ///
    /// # Errors
    /// The rule cannot be compiled.
    pub fn constraint(&self, format: Format, rule: Option<&Rule>, opened: bool) -> Result<Option<Constraint>> {
        if rule.is_none() && self.most_thought.is_none() {
            return Ok(None);
        }
        let grammars = match self.grammars.get() {
            Some(grammars) => grammars.clone(),
            None => {
                let grammars = Grammars::new(self.tokenizer.clone(), 1)?;
                let grammars = match crate::trial::process() {
                    Some(trial) => grammars.with_trial(trial),
                    None => grammars,
                };
                self.grammars.get_or_init(|| grammars).clone()
            }
        };
        let ask = Ask { content: rule, opened, most_thought: self.most_thought, ..Ask::default() };
        Ok(format.constraint(&ask, &self.tokenizer, &grammars)?)
    }

    /// Returns whether a prompt ends inside a thought, so that the answer begins with it.
    pub fn opens_thought(&self, tokens: &[u32]) -> bool {
        // The mark and the blanks behind it are in the last few.
        let tail = &tokens[tokens.len().saturating_sub(16)..];
        self.format.opens_thought(&self.tokenizer.decode(tail))
    }

    /// The context, of what it could be: `context 8192 of 32768 trained; -c sets it`.
    pub fn context(&self) -> String {
        let (context, trained) = (self.engine.context(), self.n_ctx_train);
        match context < trained {
            true => format!("context {context} of {trained} trained; -c sets it"),
            false => format!("context {context}"),
        }
    }

    /// `qwen3moe Q4_K_M`-like: architecture and type.
    pub fn short_name(&self) -> String {
        format!("{} {}", self.arch, self.file_type)
    }

    /// Returns the model's own sampling.
    pub fn default_sampling(&self) -> SamplerParams {
        // DRY may repeat across the usual breaks between sentences and fields.
        let breakers = ["\n", ":", "\"", "*"].map(|text| self.tokenizer.encode(text, Encode::default()));
        SamplerParams { dry_breakers: breakers.to_vec(), ..self.sampling.clone() }
    }

    /// Returns the user's sampling parameters over the model's defaults.
    pub fn sampling(&self, args: &SamplingArgs) -> Result<SamplerParams> {
        let mut params = self.default_sampling();
        args.apply(&mut params);
        params.seed = args.seed.unwrap_or_else(clock_seed);
        Ok(params)
    }
}

/// What a model makes of whole texts, with which it is asked for no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whole {
    /// Vectors, for `/v1/embeddings`.
    Vectors,
    /// How well the second text of a pair answers the first, for `/v1/rerank`.
    Scores,
}

impl Whole {
    /// What a plan makes; `None` where it writes text.
    pub fn of(plan: &Plan) -> Option<Whole> {
        let is_one = plan.buf(plan.logits).width == 1;
        plan.whole.then_some(if is_one { Whole::Scores } else { Whole::Vectors })
    }

    /// Where it is of use.
    pub fn route(self) -> &'static str {
        match self {
            Whole::Vectors => "/v1/embeddings",
            Whole::Scores => "/v1/rerank",
        }
    }

    /// Refuses to write text, in the words of all commands and routes.
    ///
    /// # Errors
    /// Always where there is such a model.
    pub fn refuse(whole: Option<Whole>) -> Result<()> {
        match whole {
            Some(whole) => bail!("{}", whole.no_text()),
            None => Ok(()),
        }
    }

    /// Why there is no text.
    pub fn no_text(self) -> String {
        let kind = match self {
            Whole::Vectors => "an embedding model",
            Whole::Scores => "a rerank model",
        };
        format!("this is {kind}, which writes no text: use {} of `moebius serve`", self.route())
    }
}

/// Returns a seed from the clock, for text that differs from run to run.
fn clock_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64
}

/// Returns how a model makes one vector of a text: as its file says, else from the last token, as decoders are trained,
/// or from all of them, as encoders are. Pairs are scored from their first.
fn pooling(checkpoint: &Checkpoint, whole: Option<Whole>) -> Result<Pooling> {
    let usual = match whole {
        Some(Whole::Scores) => return Ok(Pooling::First),
        Some(Whole::Vectors) => Pooling::Mean,
        None => Pooling::Last,
    };
    Ok(pooling::pooling(checkpoint)?.unwrap_or(usual))
}

/// Returns whether a model ranks documents: its file says so, or its name does.
fn reranks(checkpoint: &Checkpoint) -> bool {
    let meta = checkpoint.meta();
    let name = meta.opt_str("general.name").ok().flatten().unwrap_or_default();
    let has_template = meta.get("tokenizer.chat_template.rerank").is_some();
    has_template
        || pooling::gguf_pooling_type(checkpoint) == Some(4)
        || [name, checkpoint.name()].iter().any(|name| name.to_lowercase().contains("rerank"))
}

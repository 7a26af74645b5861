//! From logits to a token. Knows no text and no model: only rows of numbers and token ids.
//!
//! The chain and its parameters follow llama.cpp, so that settings carry over. All arithmetic is f64 with the
//! exponential and logarithm of `libm`, and the random numbers are PCG32: the same seed and logits give the same tokens
//! on every platform. After warm-up nothing is allocated per token.

mod dry;
mod mirostat;
mod params;
mod random;
mod stages;

use backend::Best;
use backend::pick::log_sum_exp_of;
pub use params::{Group, PARAMS, Param, ParamKind, ParamValue};
use random::Pcg32;
use stages::Candidates;

/// Maximum number of best logits that replace a row: beyond it the row is cheaper.
const MAX_BEST: usize = 2048;

/// A step of the chain. Steps that their parameter switches off cost nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Repetition (CTRL, Keskar et al. 2019, arXiv:1909.05858), frequency and presence penalties.
    Penalties,
    /// "Don't repeat yourself": a penalty that grows with a repetition's length (p-e-w, text-generation-webui #5677).
    Dry,
    /// Keeps logits within n standard deviations of the best (Tang et al. 2024, arXiv:2411.07641).
    TopNSigma,
    /// Keeps the k best (Fan et al. 2018, arXiv:1805.04833).
    TopK,
    /// Locally typical sampling (Meister et al. 2022, arXiv:2202.00666).
    Typical,
    /// Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751).
    TopP,
    /// Keeps tokens with at least a share of the best probability (Nguyen et al. 2024, arXiv:2407.01082).
    MinP,
    /// "Exclude top choices": at random drops all but the least likely of the top choices (p-e-w, text-generation-webui
    /// #6335).
    Xtc,
    /// Temperature, fixed or by entropy.
    Temperature,
}

/// The default order.
pub const DEFAULT_CHAIN: [Stage; 9] = [
    Stage::Penalties,
    Stage::Dry,
    Stage::TopNSigma,
    Stage::TopK,
    Stage::Typical,
    Stage::TopP,
    Stage::MinP,
    Stage::Xtc,
    Stage::Temperature,
];

/// Mirostat (Basu et al. 2020, arXiv:2007.14966): keeps the surprise of the text near a target. It replaces the chain:
/// only logit bias and temperature come before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mirostat {
    /// Not used.
    #[default]
    Off,
    /// With the estimate of the Zipf exponent.
    V1,
    /// Drops tokens with a surprise above the running bound.
    V2,
}

/// Parameters of the sampler.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerParams {
    /// Seed of the random numbers.
    pub seed: u64,
    /// At or below 0 the most likely token is taken, after logit bias, penalties and DRY; ties go to the lower id.
    pub temperature: f32,
    /// Maximum change of the temperature by the entropy, each way; 0: off.
    pub dynatemp_range: f32,
    /// Power of the normalized entropy.
    pub dynatemp_exponent: f32,
    /// 0: off.
    pub top_k: usize,
    /// 1: off.
    pub top_p: f32,
    /// 0: off.
    pub min_p: f32,
    /// 1: off.
    pub typical_p: f32,
    /// At or below 0: off.
    pub top_n_sigma: f32,
    /// Probability that XTC acts on a token; 0: off.
    pub xtc_probability: f32,
    /// Minimum probability of a top choice; above 0.5: off.
    pub xtc_threshold: f32,
    /// Every truncating step keeps at least this many candidates.
    pub min_keep: usize,
    /// Number of last tokens that the penalties cover; 0: off.
    pub penalty_last_n: usize,
    /// Divides (or, for negative logits, multiplies) the logits of seen tokens; 1: off.
    pub penalty_repeat: f32,
    /// Subtracted per occurrence; 0: off.
    pub penalty_frequency: f32,
    /// Subtracted once if the token occurred; 0: off.
    pub penalty_presence: f32,
    /// Factor of the DRY penalty; 0: off.
    pub dry_multiplier: f32,
    /// Growth of the DRY penalty per repeated token; below 1: off.
    pub dry_base: f32,
    /// Shorter repetitions cost nothing.
    pub dry_allowed_length: usize,
    /// Number of last tokens that DRY covers; 0: off.
    pub dry_last_n: usize,
    /// Token sequences that end repetitions for DRY, e.g. the tokens of "\n".
    pub dry_breakers: Vec<Vec<u32>>,
    /// Added to the logits of these tokens before everything else; minus infinity forbids a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// Version of mirostat.
    pub mirostat: Mirostat,
    /// Target surprise in bits.
    pub mirostat_tau: f32,
    /// Learning rate.
    pub mirostat_eta: f32,
    /// The steps, in order.
    pub chain: Vec<Stage>,
}

impl Default for SamplerParams {
    fn default() -> SamplerParams {
        SamplerParams {
            seed: 0,
            temperature: 0.8,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            min_keep: 0,
            penalty_last_n: 64,
            penalty_repeat: 1.0,
            penalty_frequency: 0.0,
            penalty_presence: 0.0,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_last_n: 64,
            dry_breakers: Vec::new(),
            logit_bias: Vec::new(),
            mirostat: Mirostat::Off,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            chain: DEFAULT_CHAIN.to_vec(),
        }
    }
}

impl SamplerParams {
    /// Parameters that always take the most likely token.
    pub fn greedy() -> SamplerParams {
        SamplerParams { temperature: 0.0, ..SamplerParams::default() }
    }

    fn check(&self) -> Result<(), Error> {
        for &Param { name, kind, .. } in PARAMS {
            if let ParamKind::Number { low, high, get, .. } = kind {
                // Below 0 a temperature is as 0.
                let low = if name == "temperature" { -f32::MAX } else { low };
                if !(low..=high).contains(&get(self)) {
                    return Err(Error::Param { name, value: get(self), low, high });
                }
            }
        }
        // The table's setter turns zero to "off"; here it would divide by zero.
        if self.penalty_repeat == 0.0 {
            let (low, high) = (f32::MIN_POSITIVE, f32::MAX);
            return Err(Error::Param { name: "repeat_penalty", value: 0.0, low, high });
        }
        match self.logit_bias.iter().find(|(_, b)| b.is_nan() || *b == f32::INFINITY) {
            Some(&(token, value)) => Err(Error::Bias { token, value }),
            None => Ok(()),
        }
    }

    fn penalizes(&self) -> bool {
        self.penalty_last_n > 0
            && (self.penalty_repeat != 1.0 || self.penalty_frequency != 0.0 || self.penalty_presence != 0.0)
    }

    fn dries(&self) -> bool {
        self.dry_multiplier > 0.0 && self.dry_base >= 1.0 && self.dry_last_n > 0
    }
}

/// Reasons why no token could be chosen.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Error {
    /// A parameter is out of its range or not a number.
    #[error("failed to set up the sampler: {name} is {value}, it must be between {low:?} and {high:?}")]
    Param {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: f32,
        /// The smallest allowed.
        low: f32,
        /// The largest allowed.
        high: f32,
    },
    /// A logit bias is NaN or infinite upwards.
    #[error(
        "failed to set up the sampler: the logit bias of token {token} is {value}, it must be finite or minus infinity"
    )]
    Bias {
        /// The token.
        token: u32,
        /// Its bias.
        value: f32,
    },
    /// The model gave NaN or plus infinity.
    #[error("failed to sample a token: the logit of token {token} is {value}")]
    Logit {
        /// The token.
        token: u32,
        /// Its logit.
        value: f32,
    },
    /// No token is left: all are forbidden, or there are none.
    #[error("failed to sample a token: none of the {n_vocab} tokens is allowed")]
    Nothing {
        /// Length of the row.
        n_vocab: usize,
    },
}

/// Chooses the tokens of one text. Keeps a history of accepted tokens.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplerParams,
    /// Entries of the logit bias that [`Sampler::forbid`] has added.
    n_forbidden: usize,
    /// The steps that are switched on.
    chain: Vec<Stage>,
    random: Pcg32,
    /// The last tokens, at least as many as the widest window of a step.
    history: Vec<u32>,
    window: usize,
    candidates: Candidates,
    dry: dry::Dry,
    mu: f64,
}

impl Sampler {
    /// Returns a sampler with nothing accepted yet.
    ///
    /// # Errors
    /// [`Error::Param`] or [`Error::Bias`] with the name of what is out of range.
    pub fn new(params: SamplerParams) -> Result<Sampler, Error> {
        params.check()?;
        let p = &params;
        let mut window = 0;
        let chain: Vec<Stage> = match p.mirostat {
            Mirostat::Off => p.chain.clone(),
            _ => vec![Stage::Temperature],
        };
        let chain: Vec<Stage> = chain.into_iter().filter(|s| stages::acts(*s, p)).collect();
        for stage in &chain {
            match stage {
                Stage::Penalties => window = window.max(p.penalty_last_n),
                Stage::Dry => window = window.max(p.dry_last_n),
                _ => {}
            }
        }
        Ok(Sampler {
            chain,
            random: Pcg32::new(p.seed),
            history: Vec::new(),
            window,
            candidates: Candidates::default(),
            dry: dry::Dry::new(&p.dry_breakers),
            mu: 2.0 * f64::from(p.mirostat_tau),
            n_forbidden: 0,
            params,
        })
    }

    /// Chooses none of these tokens until [`Sampler::allow_all`].
    pub fn forbid(&mut self, tokens: &[u32]) {
        self.params.logit_bias.extend(tokens.iter().map(|&token| (token, f32::NEG_INFINITY)));
        self.n_forbidden += tokens.len();
    }

    /// Ends what [`Sampler::forbid`] has begun.
    pub fn allow_all(&mut self) {
        let n = self.params.logit_bias.len() - self.n_forbidden;
        self.params.logit_bias.truncate(n);
        self.n_forbidden = 0;
    }

    /// Adds a token to the history: of the prompt, or a chosen one.
    pub fn accept(&mut self, token: u32) {
        if self.window == 0 {
            return;
        }
        // Twice the window is kept, so that dropping the older half is one rare move.
        if self.history.len() >= self.window.saturating_mul(2) {
            self.history.drain(..self.history.len() - self.window + 1);
        }
        self.history.push(token);
    }

    /// Number of best logits of the row behind `drafts`, tokens that may be accepted before it, that lead to the same
    /// choice as the whole row, and to the log-probabilities of the `logprobs` best tokens; `None` when the whole row
    /// is needed. Appends to `listed`, sorted, the further tokens whose logits are needed: those that a bias or a
    /// penalty may change.
    ///
    /// Exact: a listed token is always among the candidates, and enough others are left for [`Stage::TopK`], which
    /// later steps do not see past. Other chains need the whole distribution first.
    pub fn needs(
        &self,
        drafts: &[u32],
        logprobs: Option<usize>,
        n_vocab: usize,
        listed: &mut Vec<u32>,
    ) -> Option<usize> {
        let p = &self.params;
        let lists = |stage: &Stage| matches!(stage, Stage::Penalties | Stage::Dry);
        let n_kept = match self.chain.iter().find(|stage| !lists(stage)) {
            _ if p.mirostat != Mirostat::Off => return None,
            _ if self.is_greedy() => 1,
            Some(Stage::TopK) => p.top_k.max(p.min_keep),
            _ => return None,
        };
        let start = listed.len();
        listed.extend(p.logit_bias.iter().map(|&(id, _)| id));
        for stage in self.chain.iter().filter(|stage| lists(stage)) {
            let last_n = if *stage == Stage::Dry { p.dry_last_n } else { p.penalty_last_n };
            listed.extend_from_slice(self.tail(last_n.saturating_sub(drafts.len())));
            listed.extend_from_slice(&drafts[drafts.len().saturating_sub(last_n)..]);
        }
        listed[start..].sort_unstable();
        let mut kept = start;
        for i in start..listed.len() {
            if i == start || listed[i] != listed[kept - 1] {
                listed[kept] = listed[i];
                kept += 1;
            }
        }
        listed.truncate(kept);
        let n = n_kept.saturating_add(kept - start).max(logprobs.unwrap_or(0));
        if n > MAX_BEST.min(n_vocab) {
            listed.truncate(start);
            return None;
        }
        Some(n)
    }

    /// Returns the last `n` accepted tokens, as far as the history reaches.
    fn tail(&self, n: usize) -> &[u32] {
        &self.history[self.history.len().saturating_sub(n)..]
    }

    fn is_greedy(&self) -> bool {
        self.params.temperature <= 0.0
    }

    /// Returns whether a step may change a token's logit before the choice.
    fn changes_logits(&self) -> bool {
        let changes = |stage: &Stage| matches!(stage, Stage::Penalties | Stage::Dry);
        !self.params.logit_bias.is_empty() || self.chain.iter().any(changes)
    }

    /// Chooses a token from one row of logits, `[n_vocab]`. Does not accept it.
    ///
    /// # Errors
    /// [`Error::Logit`] for a row with NaN or plus infinity, [`Error::Nothing`] when no token is allowed.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, Error> {
        let (_, best) = stages::argmax(logits)?;
        if self.is_greedy() && !self.changes_logits() {
            return Ok(best);
        }
        self.candidates.load(logits, &self.params.logit_bias);
        self.choose(logits.len())
    }

    /// Chooses the token that [`Sampler::sample`] would choose from the whole row. `row` and `listed` are what
    /// [`Sampler::needs`] requested before the step, of a vocabulary of `n_vocab`.
    ///
    /// # Errors
    /// As [`Sampler::sample`].
    pub fn sample_best(&mut self, row: &Best<'_>, listed: &[u32], n_vocab: usize) -> Result<u32, Error> {
        if let Some((token, value)) = row.bad {
            return Err(Error::Logit { token, value });
        }
        match row.best.first() {
            None => Err(Error::Nothing { n_vocab }),
            Some(&(best, _)) if self.is_greedy() && !self.changes_logits() => Ok(best),
            Some(_) => {
                self.candidates.load_best(row, listed, &self.params.logit_bias);
                self.choose(n_vocab)
            }
        }
    }

    /// Chooses among the loaded candidates.
    fn choose(&mut self, n_vocab: usize) -> Result<u32, Error> {
        let greedy = self.is_greedy();
        let Sampler { params: p, candidates: c, .. } = self;
        if c.is_empty() {
            return Err(Error::Nothing { n_vocab });
        }
        for i in 0..self.chain.len() {
            let tail = |n: usize| &self.history[self.history.len().saturating_sub(n)..];
            match self.chain[i] {
                Stage::Penalties => c.penalties(p, tail(p.penalty_last_n)),
                Stage::Dry => self.dry.apply(c, p, tail(p.dry_last_n)),
                _ if greedy => {}
                Stage::TopNSigma => c.top_n_sigma(p),
                Stage::TopK => c.top_k(p.top_k.max(p.min_keep)),
                Stage::Typical => c.typical(p),
                Stage::TopP => c.top_p(p),
                Stage::MinP => c.min_p(p),
                Stage::Xtc => c.xtc(p, &mut self.random),
                Stage::Temperature => c.temperature(p),
            }
        }
        if greedy {
            return Ok(c.best());
        }
        match p.mirostat {
            Mirostat::Off => Ok(c.draw(&mut self.random).0),
            Mirostat::V1 => Ok(mirostat::v1(c, p, &mut self.mu, n_vocab, &mut self.random)),
            Mirostat::V2 => Ok(mirostat::v2(c, p, &mut self.mu, &mut self.random)),
        }
    }

    /// Natural logarithm of the probability that the model gave to `token`, before any step of the chain; appends the
    /// `n` most likely tokens with theirs, best first. Takes an extra pass over the row.
    ///
    /// # Errors
    /// [`Error::Logit`], [`Error::Nothing`].
    ///
    /// # Panics
    /// When the row has no such token.
    pub fn logprobs(&mut self, logits: &[f32], token: u32, n: usize, out: &mut Vec<(u32, f32)>) -> Result<f32, Error> {
        stages::argmax(logits)?;
        let sum = log_sum_exp_of(logits);
        if n > 0 {
            self.candidates.load(logits, &[]);
            self.candidates.top_k(n);
            out.extend(self.candidates.iter().map(|c| (c.id, (c.logit - sum) as f32)));
        }
        Ok((f64::from(logits[token as usize]) - sum) as f32)
    }

    /// [`Sampler::logprobs`] of a row with only its best logits, as requested by [`Sampler::needs`]; `token` was chosen
    /// from it.
    ///
    /// # Errors
    /// [`Error::Logit`], [`Error::Nothing`].
    pub fn logprobs_best(
        &self,
        row: &Best<'_>,
        listed: &[u32],
        token: u32,
        n: usize,
        out: &mut Vec<(u32, f32)>,
    ) -> Result<f32, Error> {
        if let Some((token, value)) = row.bad {
            return Err(Error::Logit { token, value });
        }
        let logprob = |logit: f32| (f64::from(logit) - row.log_sum_exp) as f32;
        out.extend(row.best.iter().take(n).map(|&(id, logit)| (id, logprob(logit))));
        let among_best = row.best.iter().find(|(id, _)| *id == token).map(|&(_, logit)| logit);
        let among_listed = || listed.binary_search(&token).ok().map(|i| row.listed[i]);
        among_best.or_else(among_listed).map(logprob).ok_or(Error::Nothing { n_vocab: row.best.len() })
    }
}

#[cfg(test)]
mod tests;
